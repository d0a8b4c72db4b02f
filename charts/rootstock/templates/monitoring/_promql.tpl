{{/*
PromQL of files/queries.yaml on one line. Takes {root, name, model}; model is a name of models[], or empty where a query has none.
A name that stands in another text is that text, to a depth of 4.
*/}}
{{- define "rootstock.promql" -}}
{{- $texts := .root.Files.Get "files/queries.yaml" | fromYaml -}}
{{- $text := required (printf "files/queries.yaml has no query %s" .name) (index $texts .name) -}}
{{- range until 4 -}}
{{- range $name, $body := $texts -}}
{{- $text = replace (printf "{{%s}}" $name) (printf "(%s)" (trim $body)) $text -}}
{{- end -}}
{{- end -}}
{{- $target := .root.Values.worker.autoscaling.backlogPerReplica -}}
{{- $model := .model -}}
{{- range include "rootstock.models" .root | fromJsonArray -}}
{{- if eq .name $model -}}{{- $target = .worker.autoscaling.backlogPerReplica -}}{{- end -}}
{{- end -}}
{{- $text = replace "{{namespace}}" .root.Release.Namespace $text -}}
{{- $text = replace "{{model}}" $model $text -}}
{{- $text = replace "{{backlogPerReplica}}" (toString $target) $text -}}
{{- regexReplaceAll "\\s+" (trim $text) " " -}}
{{- end -}}
