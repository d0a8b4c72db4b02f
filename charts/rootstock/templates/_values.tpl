{{/*
Values of keys that a values file leaves empty. Helm removes the default of such a key before it checks the schema, so that templates
would find no value. files/empty-keys.yaml has the empty value of each key, or its default if the chart needs a value. In the second
case, an error names the empty key.
*/}}

{{/* Gives every key of .Values a value, once per rendering. Every template calls this first. Takes the root. */}}
{{- define "rootstock.values" -}}
{{- if not (hasKey . "RootstockValues") -}}
{{- $_ := set . "RootstockValues" true -}}
{{- include "rootstock.values.pruned" (dict "map" .Values "name" "" "foreign" (.Files.Get "files/foreign-keys.yaml" | fromYaml)) -}}
{{- $scaling := .Values.autoscaling | default dict -}}
{{- if kindIs "bool" $scaling.adapterRules }}{{ $_ := set $scaling "adapterRules" (dict "enabled" $scaling.adapterRules) }}{{ end -}}
{{- $keys := .Files.Get "files/empty-keys.yaml" | fromYaml -}}
{{- include "rootstock.values.filled" (dict "root" . "values" .Values "empty" $keys.empty "required" $keys.required "at" "" "blame" "" "off" false) -}}
{{- $names := list -}}
{{- range .Values.image.pullSecrets }}{{ if kindIs "map" . }}{{ $names = append $names .name }}{{ else }}{{ $names = append $names . }}{{ end }}{{ end -}}
{{- $_ := set .Values.image "pullSecrets" $names -}}
{{- end -}}
{{- end }}

{{/* Removes keys without a value, also in entries of lists. Three kinds of keys stay: nulls of a pod's security context, which remove
fields (_overrides.tpl); nulls of a model's overrides (rootstock.values.over); and keys of other charts, which are refused later.
Takes {map, name, foreign}. name: the map's key; foreign: the block's part of files/foreign-keys.yaml. */}}
{{- define "rootstock.values.pruned" -}}
{{- $map := .map -}}
{{- $foreign := .foreign -}}
{{- $kept := dict "pod" (list "securityContext" "containerSecurityContext") "models" (list "worker" "tokenizer" "detokenizer") -}}
{{- $kept := get $kept .name | default list -}}
{{- range $key := keys $map -}}
{{- $value := index $map $key -}}
{{- $row := get $foreign $key -}}
{{- $below := ternary $row dict (kindIs "map" $row) -}}
{{- if not (or (has $key $kept) (and (kindIs "invalid" $value) (kindIs "string" $row) $row)) -}}
{{- if kindIs "invalid" $value -}}
{{- $_ := unset $map $key -}}
{{- else if kindIs "map" $value -}}
{{- include "rootstock.values.pruned" (dict "map" $value "name" $key "foreign" $below) -}}
{{- else if kindIs "slice" $value -}}
{{- range $value }}{{ if kindIs "map" . }}{{ include "rootstock.values.pruned" (dict "map" . "name" $key "foreign" $below) }}{{ end }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Gives the keys of a block their values. Takes {root, values, empty, required, at, blame, off}. values: the block; empty, required:
its parts of files/empty-keys.yaml; at: its path; blame: path of an empty key above it, or ""; off: a block above is switched off. */}}
{{- define "rootstock.values.filled" -}}
{{- $ctx := . -}}
{{- $values := .values -}}
{{- $required := default dict .required -}}
{{- range $key, $empty := .empty -}}
{{- if not (or (kindIs "map" $empty) (hasKey $values $key)) }}{{ $_ := set $values $key $empty }}{{ end -}}
{{- end -}}
{{- $off := or .off (include "rootstock.values.isOff" .) -}}
{{- range $key, $default := $required -}}
{{- if not (or (kindIs "map" $default) (hasKey $values $key)) -}}
{{- $path := printf "%s%s" $ctx.at $key -}}
{{- $port := and (eq $key "externalPort") $values.externalUrlSecret -}}
{{- if and $ctx.blame (not $off) -}}
  {{- fail (printf "%s is empty, which removes the defaults of all its keys, and %s needs a value. Set it, or remove %s to use its default, %s." $ctx.blame $path $ctx.blame (toJson $default)) -}}
{{- else if or $port (not $off) -}}
  {{- fail (printf "%s is empty, which removes its default, and it needs a value. Set it, or remove the key to use the default, %s." $path (toJson $default)) -}}
{{- end -}}
{{- $_ := set $values $key $default -}}
{{- end -}}
{{- end -}}
{{- range $key, $empty := .empty -}}
{{- if kindIs "map" $empty -}}
{{- $path := printf "%s%s" $ctx.at $key -}}
{{- $blame := $ctx.blame -}}
{{- if not (hasKey $values $key) -}}
{{- $_ := set $values $key dict -}}
{{- $blame = default $path $blame -}}
{{- end -}}
{{- if or $empty (hasKey $required $key) -}}
{{- include "rootstock.values.filled" (dict "root" $ctx.root "values" (index $values $key) "empty" $empty "required" (get $required $key | default dict) "at" (printf "%s." $path) "blame" $blame "off" $off) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Returns "true" if a block is switched off, so that its other keys are not read. Takes the context of rootstock.values.filled. */}}
{{- define "rootstock.values.isOff" -}}
{{- $values := .values -}}
{{- $cache := .root.Values.modelCache | default dict -}}
{{- if eq .at "modelCache.prefetch." -}}
{{- if not (or $values.enabled $cache.fetchTokenizers (eq (toString $cache.type) "pod")) }}true{{ end -}}
{{- else if eq .at "modelCache.pvc." -}}
{{- if ne (toString $cache.type) "pvc" }}true{{ end -}}
{{- else if eq .at "modelCache.prefetch.ca." -}}
{{- if not $values.configMap }}true{{ end -}}
{{- else if eq .at "tracing." -}}
{{- if not $values.otlpEndpoint }}true{{ end -}}
{{- else if hasSuffix "kvTiers.shared." .at -}}
{{- if not $values.secret }}true{{ end -}}
{{- else -}}
{{- range $key := list "enabled" "embedded" -}}
{{- if and (hasKey $values $key) (not (index $values $key)) }}true{{ end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Merges a model's overrides into a component's values, key by key. An override without a value removes the component's value; in a
security context it stays as null (_overrides.tpl). Takes {values, over, name}. name: the map's key. Changes `values`. */}}
{{- define "rootstock.values.over" -}}
{{- $values := .values -}}
{{- $name := .name -}}
{{- $contexts := list "securityContext" "containerSecurityContext" -}}
{{- range $key, $value := .over -}}
{{- if and (kindIs "invalid" $value) (or (has $name $contexts) (has $key $contexts)) -}}
{{- $_ := set $values $key $value -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $values $key -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $values $key)) -}}
{{- include "rootstock.values.over" (dict "values" (index $values $key) "over" $value "name" $key) -}}
{{- else -}}
{{- $_ := set $values $key $value -}}
{{- end -}}
{{- end -}}
{{- end }}
