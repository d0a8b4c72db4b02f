{{/* Additions to pods: `pod` of the values to all, `pod` of a component to its pods. rootstock.pod.template applies both. */}}

{{/* JSON object of both `pod` blocks, merged. Maps are merged key by key without nulls. Lists are joined; of entries with the same name,
the component's is used. For other fields, the component's value is used if it is set. A security context that is null is left out. Takes a scope. */}}
{{- define "rootstock.pod.overrides" -}}
{{- $all := default (dict) .root.Values.pod -}}
{{- $values := default (dict) .values -}}
{{- $own := deepCopy (default (dict) $values.pod) -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" "runtimeClassName" -}}
{{- if hasKey $values $key }}{{ $_ := set $own $key (index $values $key) }}{{ end -}}
{{- end -}}
{{- range $key, $name := dict "labels" "podLabels" "annotations" "podAnnotations" "env" "extraEnv" -}}
{{- if hasKey $values $name }}{{ $_ := set $own $key (index $values $name) }}{{ end -}}
{{- end -}}
{{- $out := dict -}}
{{- range $key := list "env" "envFrom" "volumes" "volumeMounts" "initContainers" "containers" "tolerations" "hostAliases" "topologySpreadConstraints" -}}
{{- $_ := set $out $key (include "rootstock.pod.behind" (dict "key" $key "all" (index $all $key) "own" (index $own $key)) | fromJsonArray) -}}
{{- end -}}
{{- range $key := list "labels" "annotations" "nodeSelector" "securityContext" "containerSecurityContext" -}}
{{- $merged := dict -}}
{{- if not (and (hasKey $own $key) (kindIs "invalid" (index $own $key))) -}}
{{- range $name, $value := mergeOverwrite (deepCopy (default (dict) (index $all $key))) (deepCopy (default (dict) (index $own $key))) -}}
{{- if not (kindIs "invalid" $value) }}{{ $_ := set $merged $name $value }}{{ end -}}
{{- end -}}
{{- if eq $key "containerSecurityContext" -}}
{{- $isSet := or (hasKey (default (dict) (index $all $key)) "readOnlyRootFilesystem") (hasKey (default (dict) (index $own $key)) "readOnlyRootFilesystem") -}}
{{- if not (or $isSet (kindIs "invalid" (index $all $key))) -}}
{{- $_ := set $merged "readOnlyRootFilesystem" (ne (include "rootstock.usesGpu" $) "true") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set $out $key $merged -}}
{{- end -}}
{{- range $key := list "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "dnsPolicy" "dnsConfig" "terminationGracePeriodSeconds" -}}
{{- $_ := set $out $key (default (index $all $key) (index $own $key)) -}}
{{- end -}}
{{- toJson $out -}}
{{- end }}

{{/* JSON list of `all` and `own` joined. Of entries with the same name, that of `own` is used. Takes {key, all, own}. key: field of pods. */}}
{{- define "rootstock.pod.behind" -}}
{{- $names := list -}}
{{- if has .key (list "env" "volumes" "initContainers" "containers") }}{{ range .own }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- $merged := list -}}
{{- range .all }}{{ if not (has .name $names) }}{{ $merged = append $merged . }}{{ end }}{{ end -}}
{{- concat $merged (default list .own) | default list | toJson -}}
{{- end }}

{{/* JSON list of the variables of `env` that the container does not have, ignoring case. Takes {container, env}. */}}
{{- define "rootstock.pod.missing" -}}
{{- $present := dict -}}
{{- range .container.env }}{{ $_ := set $present (lower .name) true }}{{ end -}}
{{- $missing := list -}}
{{- range .env }}{{ if not (hasKey $present (lower .name)) }}{{ $missing = append $missing . }}{{ end }}{{ end -}}
{{- toJson $missing -}}
{{- end }}

{{/* Adapts additions to a pod. In the prefetch Job, variables of modelCache.prefetch override those for all pods. In pods that end,
additional containers become native sidecars, which end with the pod. Takes {scope, over, main}. over: the additions; main: the chart's
container. */}}
{{- define "rootstock.pod.fitted" -}}
{{- $over := .over -}}
{{- if eq .scope.component "prefetch" -}}
{{- $own := default list (default (dict) .scope.values.pod).env -}}
{{- $common := list -}}
{{- range $over.env }}{{ if not (has . $own) }}{{ $common = append $common . }}{{ end }}{{ end -}}
{{- $_ := set $over "env" (concat (include "rootstock.pod.missing" (dict "container" .main "env" $common) | fromJsonArray) $own | default list) -}}
{{- end -}}
{{- if has .scope.component (list "prefetch" "test" "diagnosis") -}}
{{- range $over.containers }}{{ $_ := set . "restartPolicy" "Always" }}{{ end -}}
{{- $_ := set $over "initContainers" (concat $over.initContainers $over.containers | default list) -}}
{{- $_ := set $over "containers" list -}}
{{- end -}}
{{- toJson $over -}}
{{- end }}

{{/* Renders a pod or a pod template: the chart's metadata and spec, and the operator's additions in the values. Takes {scope, metadata,
spec}, where metadata and spec are the chart's, as YAML. The first container is the chart's. */}}
{{- define "rootstock.pod.template" -}}
{{- $over := include "rootstock.pod.overrides" .scope | fromJson -}}
{{- $metadata := fromYaml .metadata -}}
{{- $spec := fromYaml .spec -}}
{{- range list $metadata $spec }}{{ with .Error }}{{ fail . }}{{ end }}{{ end -}}
{{- $over = include "rootstock.pod.fitted" (dict "scope" .scope "over" $over "main" (first $spec.containers)) | fromJson -}}
{{- include "rootstock.validate.pod" (dict "scope" .scope "over" $over "spec" $spec) -}}
{{- range $key := list "labels" "annotations" -}}
{{- with mergeOverwrite (deepCopy (index $over $key)) (default (dict) (index $metadata $key)) }}{{ $_ := set $metadata $key . }}{{ end -}}
{{- end -}}
{{- $main := first $spec.containers -}}
{{- $taken := dict -}}
{{- range $over.volumes }}{{ $_ := set $taken .name true }}{{ end -}}
{{- $volumes := list -}}
{{- range default list $spec.volumes }}{{ if not (hasKey $taken .name) }}{{ $volumes = append $volumes . }}{{ end }}{{ end -}}
{{- with concat $volumes $over.volumes }}{{ $_ := set $spec "volumes" . }}{{ end -}}
{{- range $key := list "env" "volumeMounts" -}}
{{- with concat (default list (index $main $key)) (index $over $key) }}{{ $_ := set $main $key . }}{{ end -}}
{{- end -}}
{{- /* If two sources have a variable, the last source wins, so the chart's come last. */ -}}
{{- with concat $over.envFrom (default list $main.envFrom) }}{{ $_ := set $main "envFrom" . }}{{ end -}}
{{- range $container := $spec.initContainers -}}
{{- if eq .name "fetch-model" -}}
{{- range include "rootstock.pod.missing" (dict "container" . "env" $over.env) | fromJsonArray -}}
{{- if has (upper .name) (list "HTTPS_PROXY" "HTTP_PROXY" "NO_PROXY") }}{{ $_ := set $container "env" (append $container.env .) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with concat $over.initContainers (default list $spec.initContainers) }}{{ $_ := set $spec "initContainers" . }}{{ end -}}
{{- $_ := set $spec "containers" (concat $spec.containers $over.containers) -}}
{{- with $over.containerSecurityContext -}}
{{- range concat (default list $spec.initContainers) $spec.containers -}}
{{- if not (hasKey . "securityContext") }}{{ $_ := set . "securityContext" $over.containerSecurityContext }}{{ end -}}
{{- end -}}
{{- end -}}
{{- range $key := list "nodeSelector" "securityContext" "affinity" "priorityClassName" "runtimeClassName" "schedulerName" "dnsPolicy" "dnsConfig" "hostAliases" -}}
{{- with index $over $key }}{{ $_ := set $spec $key . }}{{ end -}}
{{- end -}}
{{- with int $over.terminationGracePeriodSeconds }}{{ $_ := set $spec "terminationGracePeriodSeconds" . }}{{ end -}}
{{- with include "rootstock.pod.tolerations" (dict "scope" .scope "given" $over.tolerations) | fromYamlArray }}{{ $_ := set $spec "tolerations" . }}{{ end -}}
{{- with default (include "rootstock.pod.spread" .scope | fromYamlArray) $over.topologySpreadConstraints }}{{ $_ := set $spec "topologySpreadConstraints" . }}{{ end -}}
{{- dict "metadata" $metadata "spec" $spec | toYaml -}}
{{- end }}

{{/* YAML list of tolerations. Services leave lost nodes after nodeLostSeconds; workers tolerate the taint of GPU nodes. Takes
{scope, given}. given: tolerations of the values. */}}
{{- define "rootstock.pod.tolerations" -}}
{{- $keys := list -}}
{{- range .given }}{{ $keys = append $keys (default "" .key) }}{{ end -}}
{{- $values := default (dict) .scope.values -}}
{{- $all := .given -}}
{{- if include "rootstock.usesGpu" .scope -}}
{{- $key := ternary "nvidia.com/gpu" $values.gpuResource (or (hasPrefix "nvidia.com/" $values.gpuResource) (eq (int $values.gpus) 0)) -}}
{{- $all = append $all (dict "key" $key "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- if hasKey $values "nodeLostSeconds" -}}
{{- range $key := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" -}}
{{- if not (has $key $keys) -}}
{{- $all = append $all (dict "key" $key "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" $values.nodeLostSeconds) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end }}

{{/* YAML list of constraints that spread pods over zones and nodes, if possible. Takes a scope. */}}
{{- define "rootstock.pod.spread" -}}
{{- if not (dig "topologySpread" false (default (dict) .values)) -}}
[]
{{- else -}}
{{- $kind := default "Deployment" .values.kind -}}
{{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
- maxSkew: 1
  topologyKey: {{ $key }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "rootstock.selector" $ | nindent 6 }}
  {{- if ne $kind "LeaderWorkerSet" }}
  matchLabelKeys: [{{ ternary "pod-template-hash" "controller-revision-hash" (eq $kind "Deployment") }}]  # old pods of a rollout do not count
  {{- end }}
{{- end }}
{{- end -}}
{{- end }}

{{/* Update strategy of a scope's Deployment, StatefulSet or LeaderWorkerSet. */}}
{{- define "rootstock.strategy" -}}
{{- $kind := default "Deployment" .values.kind -}}
{{- $strategy := .values.strategy -}}
{{- $pace := dict -}}
{{- range $key := ternary (list "maxUnavailable") (list "maxUnavailable" "maxSurge") (eq $kind "StatefulSet") -}}
{{- if hasKey $strategy $key }}{{ $_ := set $pace $key (index $strategy $key) }}{{ end -}}
{{- end -}}
{{- $out := dict "type" $strategy.type -}}
{{- if eq $kind "LeaderWorkerSet" -}}
{{- $_ := set $out "rollingUpdateConfiguration" $pace -}}
{{- else if and $pace (eq $strategy.type "RollingUpdate") (or (eq $kind "Deployment") (ne (toString $strategy.maxUnavailable) "1")) -}}
{{- $_ := set $out "rollingUpdate" $pace -}}
{{- end -}}
{{- toYaml $out -}}
{{- end }}
