{{/*
PromQL of files/queries.yaml on one line. Takes {root, name, model, mode}; model is a name of models[], or empty where a query has
none; mode is its workers': where it is decode, or prefill, their figures alone count. A name that stands in another text is that
text, to a depth of 4; one that ends with the mode comes before it.
*/}}
{{- define "rootstock.promql" -}}
{{- $texts := .root.Files.Get "files/queries.yaml" | fromYaml -}}
{{- $text := required (printf "files/queries.yaml has no query %s" .name) (index $texts .name) -}}
{{- $mode := default "both" .mode -}}
{{- range until 4 -}}
{{- range $name, $body := $texts -}}
{{- $text = replace (printf "{{%s}}" $name) (printf "(%s)" (trim (default $body (index $texts (printf "%s_%s" $name $mode))))) $text -}}
{{- end -}}
{{- end -}}
{{- $target := .root.Values.worker.autoscaling.backlogPerReplica -}}
{{- $model := .model -}}
{{- range include "rootstock.models" .root | fromJsonArray -}}
{{- if eq .name $model -}}{{- $target = .worker.autoscaling.backlogPerReplica -}}{{- end -}}
{{- end -}}
{{- $text = replace "{{pool}}" (ternary "" (printf ",engine_type=%q" $mode) (eq $mode "both")) $text -}}
{{- $text = replace "{{namespace}}" .root.Release.Namespace $text -}}
{{- $text = replace "{{model}}" $model $text -}}
{{- $text = replace "{{backlogPerReplica}}" (toString $target) $text -}}
{{- regexReplaceAll "\\s+" (trim $text) " " -}}
{{- end -}}
