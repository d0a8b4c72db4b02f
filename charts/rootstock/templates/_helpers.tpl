{{/*
Names, labels and images. Most helpers take a "scope", a dict of
  root       the chart's context
  component  gateway, tokenizer, detokenizer, worker, redis, state, prefetch or test
  values     the component's values with the model's overrides
  model      an entry of rootstock.models; absent if the component serves all models
  role       label of the pods instead of `component`, if a component has two kinds of pods
  pool       name of objects and pods instead of `component`: prefill for prefill workers
  mode       of workers: both, or prefill and decode if the model has prefill workers
*/}}

{{/* A name of at most .max characters. A longer name is cut and gets a hash, so that it stays unique. Takes {name, max}. */}}
{{- define "rootstock.short" -}}
{{- if le (len .name) (int .max) -}}
{{ .name | trimSuffix "-" }}
{{- else -}}
{{ .name | trunc (int (sub .max 7)) | trimSuffix "-" }}-{{ .name | sha256sum | trunc 6 }}
{{- end -}}
{{- end }}

{{/* Prefix of all names. At most 20 characters, so that a label with component, model slug and controller hash has at most 63. */}}
{{- define "rootstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "rootstock.short" (dict "name" (default $full .Values.fullnameOverride | replace "." "-") "max" 20) -}}
{{- end }}

{{/* A model's name in the form that names of objects and labels allow. Takes the name. */}}
{{- define "rootstock.slug" -}}
{{- include "rootstock.short" (dict "name" (regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-") "max" 22) -}}
{{- end }}

{{/* JSON list of {name, slug, path, source, size, cached, filled, tokenizer, detokenizer, worker}, with the models' overrides.
cached: the model is in the model cache, or is its whole content; filled: the operator provides the cache's volume, which may already
contain the models; size: of files/model-sizes.yaml, overridden by the entry's. */}}
{{- define "rootstock.models" -}}
{{- if not (hasKey . "RootstockModels") -}}
{{- $keys := .Files.Get "files/empty-keys.yaml" | fromYaml -}}
{{- $sizes := .Files.Get "files/model-sizes.yaml" | fromYaml -}}
{{- $models := list -}}
{{- range $index, $entry := .Values.models -}}
{{- $slug := include "rootstock.slug" $entry.name -}}
{{- $cache := $.Values.modelCache -}}
{{- $filled := or (has $cache.type (list "hostPath" "image")) (and (eq $cache.type "pvc") (ne $cache.pvc.existingClaim "")) -}}
{{- $whole := and (eq $entry.path $cache.mountPath) $filled (not $cache.prefetch.enabled) (not $cache.fetchTokenizers) -}}
{{- $cached := and (ne $cache.type "none") (or (hasPrefix (printf "%s/" $cache.mountPath) $entry.path) $whole) -}}
{{- $model := dict "name" $entry.name "slug" $slug "path" $entry.path "source" (default "" $entry.source) "cached" $cached "filled" $filled -}}
{{- range $component := list "tokenizer" "detokenizer" "worker" -}}
{{- $values := deepCopy (index $.Values $component) -}}
{{- include "rootstock.values.over" (dict "values" $values "over" (deepCopy (default dict (index $entry $component))) "name" $component) -}}
{{- include "rootstock.values.pruned" (dict "map" $values "name" $component "foreign" dict) -}}
{{- include "rootstock.values.filled" (dict "root" $ "values" $values "empty" (index $keys.empty $component) "required" (index $keys.required $component) "at" (printf "models[%d].%s." $index $component) "blame" "" "off" false) -}}
{{- $_ := set $model $component $values -}}
{{- end -}}
{{- $known := get $sizes (default "" $entry.source | splitList "@" | first | trimSuffix "/" | base | lower) | default dict -}}
{{- $_ := set $model "size" (mergeOverwrite (deepCopy $known) (default dict $entry.size)) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- $_ := set . "RootstockModels" (toJson $models) -}}
{{- end -}}
{{- .RootstockModels -}}
{{- end }}

{{/* JSON list of scopes without `root`: one for each model's workers, and one for its prefill workers, if it has any. */}}
{{- define "rootstock.workerPools" -}}
{{- $pools := list -}}
{{- range $model := include "rootstock.models" . | fromJsonArray -}}
{{- $prefill := $model.worker.prefill -}}
{{- $values := omit $model.worker "prefill" -}}
{{- $apart := or $prefill.autoscaling.enabled (gt (int $prefill.replicas) 0) -}}
{{- $pools = append $pools (dict "component" "worker" "mode" (ternary "decode" "both" $apart) "values" $values "model" $model) -}}
{{- if $apart -}}
{{- $own := deepCopy $prefill -}}
{{- range $key, $value := $prefill }}{{ if and (kindIs "slice" $value) (not $value) }}{{ $own = omit $own $key }}{{ end }}{{ end -}}
{{- $own = mergeOverwrite (deepCopy $values) $own -}}
{{- range $key, $value := $prefill.pod -}}
{{- if kindIs "slice" $value -}}
{{- $_ := set $own.pod $key (include "rootstock.pod.behind" (dict "key" $key "all" (index $values.pod $key) "own" $value) | fromJsonArray) -}}
{{- end -}}
{{- end -}}
{{- $pools = append $pools (dict "component" "worker" "pool" "prefill" "mode" "prefill" "values" $own "model" $model) -}}
{{- end -}}
{{- end -}}
{{- toJson $pools -}}
{{- end }}

{{/* Returns "true" if a model has prefill workers. Takes the root. */}}
{{- define "rootstock.hasPrefill" -}}
{{- range include "rootstock.workerPools" . | fromJsonArray }}{{ if eq .mode "prefill" }}true{{ end }}{{ end -}}
{{- end }}

{{- define "rootstock.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name of a component's objects. Takes a scope. */}}
{{- define "rootstock.componentName" -}}
{{ include "rootstock.fullname" .root }}-{{ default .component .pool }}{{ with .model }}-{{ .slug }}{{ end }}
{{- end }}

{{/* Address of a component's Service inside the cluster. Takes a scope. */}}
{{- define "rootstock.host" -}}
{{ include "rootstock.fullname" .root }}-{{ default .component .pool }}.{{ .root.Release.Namespace }}.svc
{{- end }}

{{/* Labels of selectors, which never change while a release exists. Takes a scope. */}}
{{- define "rootstock.selector" -}}
app.kubernetes.io/name: {{ include "rootstock.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with default (default .component .pool) .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
rootstock.io/model: {{ .slug | quote }}
{{- end }}
{{- end }}

{{/* Labels of an object. Takes a scope. */}}
{{- define "rootstock.labels" -}}
{{- $own := include "rootstock.labels.own" . | fromYaml -}}
{{- mergeOverwrite (deepCopy .root.Values.commonLabels) $own | toYaml -}}
{{- end }}

{{- define "rootstock.labels.own" -}}
{{ include "rootstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rootstock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* An image's reference. Takes {root, image, variant}. image: {registry, repository, tag, digest}; variant: suffix of the default tag,
or "". A repository that begins with a registry stays as it is. */}}
{{- define "rootstock.image" -}}
{{- $host := regexFind "^[^/]+/" .image.repository -}}
{{- $whole := and $host (or (contains "." $host) (contains ":" $host) (eq $host "localhost/")) -}}
{{- if or .image.registry (not $whole) -}}
{{- with default .root.Values.image.registry .image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- end -}}
{{ .image.repository }}
{{- if .image.tag -}}
:{{ .image.tag }}
{{- else if not .image.digest -}}
:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}{{ with .variant }}-{{ . }}{{ end }}
{{- end -}}
{{- with .image.digest }}@{{ . }}{{ end -}}
{{- end }}

{{/* Image of a scope's container. The CUDA executor has a separate image. */}}
{{- define "rootstock.componentImage" -}}
{{- $variant := ternary "cuda" "" (eq (include "rootstock.worker.executor" .) "cuda") -}}
{{- include "rootstock.image" (dict "root" .root "image" .values.image "variant" $variant) -}}
{{- end }}

{{/* Returns "true" if the pods of a scope request a GPU, or run the CUDA executor. */}}
{{- define "rootstock.usesGpu" -}}
{{- $values := default (dict) .values -}}
{{- if hasKey $values "gpus" -}}
{{- if or (gt (int $values.gpus) 0) (gt (len $values.resourceClaims) 0) (eq (include "rootstock.worker.executor" .) "cuda") }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* ServiceAccount of a scope. Each component with rights has its own; the others share one. */}}
{{- define "rootstock.serviceAccount" -}}
{{- $account := .root.Values.serviceAccount -}}
{{- $base := default (include "rootstock.fullname" .root) $account.name -}}
{{- if not $account.create -}}
{{ default "default" $account.name }}
{{- else if has .component (list "gateway" "worker" "diagnosis") -}}
{{ $base }}-{{ .component }}
{{- else -}}
{{ $base }}
{{- end -}}
{{- end }}

{{/* Returns "true" if the pods of a scope call the API server: gateways that watch EndpointSlices, workers that set their deletion cost,
and the diagnosis. */}}
{{- define "rootstock.usesApi" -}}
{{- if eq .component "gateway" -}}
{{- if eq .values.discovery "k8s" }}true{{ end -}}
{{- else if eq .component "worker" -}}
{{- if and (eq .values.kind "Deployment") .values.deletionCost }}true{{ end -}}
{{- else if eq .component "diagnosis" -}}
true
{{- end -}}
{{- end }}
