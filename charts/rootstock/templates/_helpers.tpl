{{/*
Names, labels, images. A "scope" is what most helpers take: a dict of
  root       the chart's own context
  component  gateway, tokenizer, detokenizer, worker, redis, state, prefetch or test
  values     the component's values, with the model's overrides merged in
  model      an entry of rootstock.models; absent where a component serves all models
  role       what pods are labelled as instead of `component`, where a component has pods of two kinds
  pool       what objects and their pods are called instead of `component`: prefill, of workers that compute prompts
  mode       of workers: both, or prefill and decode where a model has such
*/}}

{{/* A name of at most .max characters; a longer one is cut and told apart by a hash. Takes {name, max}. */}}
{{- define "rootstock.short" -}}
{{- if le (len .name) (int .max) -}}
{{ .name | trimSuffix "-" }}
{{- else -}}
{{ .name | trunc (int (sub .max 7)) | trimSuffix "-" }}-{{ .name | sha256sum | trunc 6 }}
{{- end -}}
{{- end }}

{{/* At most 20 characters: with a component, a model's slug and a controller's hash, labels stay within 63. */}}
{{- define "rootstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "rootstock.short" (dict "name" (default $full .Values.fullnameOverride | replace "." "-") "max" 20) -}}
{{- end }}

{{/* A model's name as objects and labels can have it. Takes the name. */}}
{{- define "rootstock.slug" -}}
{{- include "rootstock.short" (dict "name" (regexReplaceAll "[^a-z0-9]+" (lower .) "-" | trimAll "-") "max" 22) -}}
{{- end }}

{{/* JSON list of {name, slug, path, source, size, cached, filled, tokenizer, detokenizer, worker}, the overrides merged key by key.
cached: it lies in the model cache, or is all of it; filled: by whoever made that; size: of files/model-sizes.yaml, below the entry's. */}}
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

{{/* JSON list of scopes without `root`, one for each set of workers: a model's, and those that compute prompts for them, if any. */}}
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

{{/* "true" if a model has workers that compute prompts for others. Takes the root. */}}
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

{{/* What never changes while a release lives: selectors are made of it. Takes a scope. */}}
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

{{/* Takes {root, image, variant}: image is {registry, repository, tag, digest}; variant, if any, ends a tag that the image does not
name itself. A repository that begins with a registry is complete, so no registry is put before it. */}}
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

{{/* Image of a scope's container: the CUDA executor has one of its own. */}}
{{- define "rootstock.componentImage" -}}
{{- $variant := ternary "cuda" "" (eq (include "rootstock.worker.executor" .) "cuda") -}}
{{- include "rootstock.image" (dict "root" .root "image" .values.image "variant" $variant) -}}
{{- end }}

{{/* "true" if the pods of a scope are given a GPU, or look for one. */}}
{{- define "rootstock.usesGpu" -}}
{{- $values := default (dict) .values -}}
{{- if hasKey $values "gpus" -}}
{{- if or (gt (int $values.gpus) 0) (gt (len $values.resourceClaims) 0) (eq (include "rootstock.worker.executor" .) "cuda") }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* ServiceAccount of a scope: one for each component that has rights, one for all others. */}}
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

{{/* "true" if the pods of a scope talk to the API server: gateways that watch EndpointSlices, workers that tell their deletion cost, the diagnosis. */}}
{{- define "rootstock.usesApi" -}}
{{- if eq .component "gateway" -}}
{{- if eq .values.discovery "k8s" }}true{{ end -}}
{{- else if eq .component "worker" -}}
{{- if and (eq .values.kind "Deployment") .values.deletionCost }}true{{ end -}}
{{- else if eq .component "diagnosis" -}}
true
{{- end -}}
{{- end }}
