{{/*
PromQL of files/queries.yaml on one line. Takes {root, name, model, mode}. model: a name of models[], or empty for queries without a
model; mode: with decode or prefill, only series of these workers count. {{name}} in a query is replaced by the query with that name,
up to a depth of 4. A name without a query stands for the query NAME_MODE.
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
