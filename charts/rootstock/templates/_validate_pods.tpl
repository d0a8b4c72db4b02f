{{/* Refuses values that would break pods. */}}

{{/* Checks the additions to a pod. Takes {scope, over, spec}. over: the additions; spec: the chart's spec. */}}
{{- define "rootstock.validate.pod" -}}
{{- $at := .scope.component -}}
{{- with .scope.pool }}{{ $at = . }}{{ end -}}
{{- with .scope.model }}{{ $at = printf "%s of model %s" $at .name }}{{ end -}}
{{- $values := default (dict) .scope.values -}}
{{- $spec := .spec -}}
{{- $over := .over -}}
{{- $main := first $spec.containers -}}
{{- $variables := dict -}}
{{- range $main.env }}{{ $_ := set $variables .name true }}{{ end -}}
{{- $own := list -}}
{{- range $values.extraEnv }}{{ $own = append $own .name }}{{ end -}}
{{- range $over.env -}}
  {{- $from := ternary "extraEnv" "pod.env" (has .name $own) -}}
  {{- if and (hasPrefix "ROOTSTOCK_" .name) (or (eq $from "pod.env") (not (dig "valueFrom" "secretKeyRef" false .))) -}}
    {{- fail (printf "%s: %s sets %s. Settings of the services belong under `settings` (%s), come from a Secret by extraEnv and valueFrom.secretKeyRef, or have another value in values.yaml (drainSeconds, auth, redis, …)." $at $from .name (trimPrefix "ROOTSTOCK_" .name | lower)) -}}
  {{- end -}}
  {{- if hasKey $variables .name -}}
    {{- fail (printf "%s: %s sets %s, which the chart sets for its container. Use another variable." $at $from .name) -}}
  {{- end -}}
{{- end -}}
{{- $volumes := dict -}}
{{- range $spec.volumes }}{{ $_ := set $volumes .name true }}{{ end -}}
{{- range $name := list "cache" "data" "kv" }}{{ $_ := set $volumes $name true }}{{ end -}}
{{- range $over.volumes -}}
  {{- if and (hasKey $volumes .name) (ne .name "tmp") -}}
    {{- fail (printf "%s: pod.volumes has a volume named %s, and the chart has a volume with this name. Choose another name; only tmp can be replaced." $at .name) -}}
  {{- end -}}
{{- end -}}
{{- range $over.volumes }}{{ $_ := set $volumes .name true }}{{ end -}}
{{- $paths := dict -}}
{{- range $main.volumeMounts }}{{ $_ := set $paths .mountPath true }}{{ end -}}
{{- range $over.volumeMounts -}}
  {{- if not (hasKey $volumes .name) -}}
    {{- fail (printf "%s: pod.volumeMounts mounts %s, and the pod has no such volume. Add it to pod.volumes." $at .name) -}}
  {{- end -}}
  {{- if or (hasKey $paths .mountPath) (has (trimSuffix "/" .mountPath) (list "" "/app" "/opt/venv")) -}}
    {{- fail (printf "%s: pod.volumeMounts mounts %s at %s, where the chart or the image has files. Choose another path." $at .name .mountPath) -}}
  {{- end -}}
{{- end -}}
{{- $names := dict -}}
{{- $ports := dict -}}
{{- range concat (default list $spec.initContainers) $spec.containers -}}
  {{- $_ := set $names .name true -}}
  {{- range .ports }}{{ $_ := set $ports (toString .containerPort) true }}{{ $_ := set $ports .name true }}{{ end -}}
{{- end -}}
{{- range concat $over.initContainers $over.containers -}}
  {{- if hasKey $names .name -}}
    {{- fail (printf "%s: pod.containers or pod.initContainers has a container named %s, and another container has this name. Choose another name." $at .name) -}}
  {{- end -}}
  {{- $_ := set $names .name true -}}
  {{- $container := .name -}}
  {{- range .ports -}}
    {{- if or (hasKey $ports (toString .containerPort)) (hasKey $ports (default "" .name)) -}}
      {{- fail (printf "%s: container %s has port %v (%s), which is one of the chart's: Services would lead to it. Choose another number and name." $at $container .containerPort (default "no name" .name)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and (dig "autoscaling" "enabled" false $values) (dig "autoscaling" "targetCPUPercent" false $values) -}}
  {{- range $over.containers -}}
    {{- if not (dig "resources" "requests" "cpu" "" .) -}}
      {{- fail (printf "%s: autoscaling.targetCPUPercent is a share of the CPU requests of all containers, and container %s has no resources.requests.cpu. Set it." $at .name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $grace := int $over.terminationGracePeriodSeconds -}}
{{- $least := int $spec.terminationGracePeriodSeconds -}}
{{- if and $grace (lt $grace $least) -}}
  {{- fail (printf "%s: pod.terminationGracePeriodSeconds is %d, and its drain needs %d: the pod would be killed while requests run. Raise it, lower drainSeconds, or leave it out." $at $grace $least) -}}
{{- end -}}
{{- end }}

{{/* Checks update strategies and device claims. Takes the root. */}}
{{- define "rootstock.validate.pods" -}}
{{- $scopes := list (dict "at" "gateway" "values" .Values.gateway) -}}
{{- range $model := include "rootstock.models" . | fromJsonArray -}}
  {{- range $component := list "tokenizer" "detokenizer" -}}
    {{- $scopes = append $scopes (dict "at" (printf "%s of model %s" $component $model.name) "values" (index $model $component)) -}}
  {{- end -}}
{{- end -}}
{{- range include "rootstock.workerPools" . | fromJsonArray -}}
  {{- $scopes = append $scopes (dict "at" (printf "%s of model %s" (default "worker" .pool) .model.name) "values" .values) -}}
  {{- $at := printf "%s of model %s" (default "worker" .pool) .model.name -}}
  {{- range .values.resourceClaims -}}
    {{- if ne (len (compact (list .resourceClaimName .resourceClaimTemplateName .deviceClassName))) 1 -}}
      {{- fail (printf "%s: resourceClaims: %s needs exactly one of deviceClassName, resourceClaimTemplateName and resourceClaimName. Set the class of its devices, or name an existing template or claim." $at .name) -}}
    {{- end -}}
  {{- end -}}
  {{- if and .values.executor .values.settings.executor (ne .values.executor .values.settings.executor) -}}
    {{- fail (printf "%s: executor is %s, and settings.executor is %s. Remove the latter." $at .values.executor .values.settings.executor) -}}
  {{- end -}}
{{- end -}}
{{- range $scopes -}}
  {{- $kind := default "Deployment" .values.kind -}}
  {{- $strategy := .values.strategy -}}
  {{- $wrong := dict "Deployment" (list "OnDelete") "StatefulSet" (list "Recreate") "LeaderWorkerSet" (list "OnDelete" "Recreate") -}}
  {{- if has $strategy.type (index $wrong $kind) -}}
    {{- fail (printf "%s: strategy.type is %s, which a %s does not have. Set it to RollingUpdate." .at $strategy.type $kind) -}}
  {{- end -}}
  {{- $surge := ternary "0" (toString $strategy.maxSurge | trimSuffix "%") (eq $kind "StatefulSet") -}}
  {{- if and (eq $surge "0") (eq (toString $strategy.maxUnavailable | trimSuffix "%") "0") -}}
    {{- fail (printf "%s: strategy.maxSurge and maxUnavailable are both 0, so no pod could be replaced. Raise maxSurge or maxUnavailable (a StatefulSet has no maxSurge)." .at) -}}
  {{- end -}}
{{- end -}}
{{- end }}
