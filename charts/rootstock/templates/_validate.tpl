{{/* Checks that a schema cannot express. Unless noted, each takes the root. Each renders nothing, or fails with the remedy. */}}

{{/* Refuses keys of other charts. Takes {at, rows, values}. at: path of the block; rows: its part of files/foreign-keys.yaml; values: the
block. */}}
{{- define "rootstock.validate.foreign" -}}
{{- $ctx := . -}}
{{- range $key, $row := .rows -}}
  {{- if and $key (hasKey $ctx.values $key) -}}
    {{- $value := index $ctx.values $key -}}
    {{- $path := printf "%s%s" $ctx.at $key -}}
    {{- if kindIs "string" $row -}}
      {{- fail (printf "%s is not a key of this chart: %s." $path $row) -}}
    {{- else if kindIs "map" $value -}}
      {{- include "rootstock.validate.foreign" (dict "at" (printf "%s." $path) "rows" $row "values" $value) -}}
    {{- else if kindIs "slice" $value -}}
      {{- range $index, $entry := $value -}}
        {{- if kindIs "map" $entry -}}
          {{- include "rootstock.validate.foreign" (dict "at" (printf "%s[%d]." $path $index) "rows" $row "values" $entry) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
    {{- if and (kindIs "map" $row) (hasKey $row "") -}}
      {{- fail (printf "%s is not a key of this chart: %s." $path (get $row "")) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* Refuses images of this project without a registry, because the project publishes its images nowhere. */}}
{{- define "rootstock.validate.images" -}}
{{- $images := dict "gateway" .Values.gateway.image "modelCache.prefetch" .Values.modelCache.prefetch.image -}}
{{- if .Values.tests.enabled }}{{ $_ := set $images "tests" .Values.tests.image }}{{ end -}}
{{- range $index, $model := include "rootstock.models" . | fromJsonArray -}}
  {{- range $component := list "tokenizer" "detokenizer" "worker" -}}
    {{- $_ := set $images (printf "%s of model %s" $component $model.name) (index $model $component).image -}}
  {{- end -}}
{{- end -}}
{{- range $at, $image := $images -}}
  {{- if not (regexMatch "^([^/]*[.:][^/]*|localhost)/" (include "rootstock.image" (dict "root" $ "image" $image))) -}}
    {{- fail (printf "%s: its image %s has no registry, because image.registry is %q. Build the images and set image.registry to the host that has them (docs/how-to/kubernetes/images.md#registry): the project publishes none." $at $image.repository (default $.Values.image.registry $image.registry)) -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.models" -}}
{{- if not (regexMatch "^[a-z]" (include "rootstock.fullname" .)) -}}
  {{- fail (printf "objects would be named %q, and a Service's name begins with a letter. Choose another release name, or set fullnameOverride." (include "rootstock.fullname" .)) -}}
{{- end -}}
{{- $names := dict -}}
{{- $slugs := dict -}}
{{- $digests := dict -}}
{{- range $model := include "rootstock.models" . | fromJsonArray -}}
  {{- if hasKey $names .name -}}
    {{- fail (printf "models: two entries have the name %q. Names must differ: clients choose a model by its name." .name) -}}
  {{- end -}}
  {{- $_ := set $names .name true -}}
  {{- if hasKey $slugs .slug -}}
    {{- fail (printf "models: the names %q and %q both become %q in the names of objects. Rename one model." (index $slugs .slug) .name .slug) -}}
  {{- end -}}
  {{- $_ := set $slugs .slug .name -}}
  {{- range $size := list "hosts" "gpus" -}}
    {{- if gt (int (index $model.worker $size)) 1 -}}
      {{- fail (printf "model %s: worker.%s is %d, and a worker of this version runs on one GPU of one host. Set it to 1; more workers (worker.replicas) share the load." $model.name $size (int (index $model.worker $size))) -}}
    {{- end -}}
  {{- end -}}
  {{- if and (include "rootstock.usesGpu" (dict "values" .worker)) (eq (dig "limits" "memory" "" .worker.resources | toString) "4Gi") -}}
    {{- fail (printf "model %s: worker.resources are those of the demo model on a CPU. Set the resources of a worker with a GPU, e.g. requests {cpu: \"4\", memory: 32Gi} and limits {memory: 64Gi} (docs/how-to/kubernetes/sizing.md)." .name) -}}
  {{- end -}}
  {{- $device := ternary "GPUs" "CPUs" (eq (include "rootstock.worker.executor" (dict "values" .worker)) "cuda") -}}
  {{- if ne (get $digests (default "none" .worker.image.digest) | default $device) $device -}}
    {{- fail (printf "model %s: worker.image.digest would also apply to workers on the other kind of device, and %s have another image. Set it for each model, in models[].worker.image." .name $device) -}}
  {{- end -}}
  {{- with .worker.image.digest }}{{ $_ := set $digests . $device }}{{ end -}}
  {{- $size := toString .worker.cacheSize -}}
  {{- if and (ne $size "0") .worker.cacheVolume -}}
    {{- fail (printf "model %s: worker.cacheSize and worker.cacheVolume are both set: a worker has one cache volume. Set cacheSize to 0, or remove cacheVolume." .name) -}}
  {{- end -}}
  {{- if and (ne $size "0") (ne .worker.kind "StatefulSet") -}}
    {{- fail (printf "model %s: worker.cacheSize is a volume for each pod, which only worker.kind StatefulSet has; it is %s. Change kind, or set cacheSize to 0." .name .worker.kind) -}}
  {{- end -}}
  {{- if and (or (ne $size "0") .worker.cacheVolume) (not .cached) -}}
    {{- fail (printf "model %s: worker.cacheSize or cacheVolume needs a model in the model cache to copy. Set modelCache.type and the model's path below %s, or remove cacheSize and cacheVolume." .name $.Values.modelCache.mountPath) -}}
  {{- end -}}
  {{- if and (eq $.Values.modelCache.type "pod") (not (and .cached .source (or .worker.cacheVolume (ne $size "0")))) -}}
    {{- fail (printf "model %s: modelCache.type pod has each worker fetch its model, which needs a source, a path below %s, and a disk: worker.cacheVolume, or with kind StatefulSet worker.cacheSize." .name $.Values.modelCache.mountPath) -}}
  {{- end -}}
  {{- if eq $.Values.modelCache.type "pod" -}}
    {{- range $name := list "speculative_draft_model_path" "speculative_ngram_external_corpus_path" -}}
      {{- $path := index $model.worker.settings $name | default "" | toString -}}
      {{- if hasPrefix (printf "%s/" $.Values.modelCache.mountPath) $path -}}
        {{- fail (printf "model %s: worker.settings.%s is %s, and with modelCache.type pod a worker fetches only its model. Use an image that has this file elsewhere, or choose another modelCache.type." $model.name $name $path) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
  {{- if and $.Values.modelCache.fetchTokenizers .cached (not .source) -}}
    {{- fail (printf "model %s: modelCache.fetchTokenizers is true, but the model has no download source. Set models[].source, or fetchTokenizers to false." .name) -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{/* Checks models with prefill workers. */}}
{{- define "rootstock.validate.prefill" -}}
{{- range $pool := include "rootstock.workerPools" . | fromJsonArray -}}
{{- if eq .mode "prefill" -}}
  {{- $worker := .model.worker -}}
  {{- if eq $worker.kind "LeaderWorkerSet" -}}
    {{- fail (printf "model %s: worker.prefill needs workers of one pod each, and worker.kind is LeaderWorkerSet. Set kind to Deployment or StatefulSet, or prefill.replicas to 0." .model.name) -}}
  {{- end -}}
  {{- $least := ternary $worker.autoscaling.minReplicas $worker.replicas $worker.autoscaling.enabled -}}
  {{- if lt (int $least) 1 -}}
    {{- fail (printf "model %s: worker.prefill needs at least one decode worker, and worker.%s is 0. Raise it, or set prefill.replicas to 0." .model.name (ternary "autoscaling.minReplicas" "replicas" $worker.autoscaling.enabled)) -}}
  {{- end -}}
  {{- range $name := list "page_size" "dtype" "quantization" "quantize_head" "deterministic" "context_len" "speculative_algorithm" "speculative_draft_model_path" -}}
    {{- if and (hasKey $worker.prefill.settings $name) (ne (index $worker.prefill.settings $name | toString) (index $worker.settings $name | toString)) -}}
      {{- fail (printf "model %s: worker.prefill.settings.%s differs from worker.settings, and workers read each other's KV only if this setting is the same. Set it in worker.settings, which holds for both." $pool.model.name $name) -}}
    {{- end -}}
  {{- end -}}
  {{- range $settings := list $worker.settings $worker.prefill.settings -}}
    {{- if eq (toString $settings.enable_radix_cache) "false" -}}
      {{- fail (printf "model %s: worker.prefill moves cached KV from worker to worker, and settings.enable_radix_cache is false. Remove it, or set prefill.replicas to 0." $pool.model.name) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.settings" -}}
{{- $requestTimeout := default 600 .Values.gateway.settings.request_timeout_s -}}
{{- if ge (float64 .Values.gateway.queueTimeoutSeconds) (float64 $requestTimeout) -}}
  {{- fail (printf "gateway.queueTimeoutSeconds (%v) must be less than gateway.settings.request_timeout_s (%v): a request that waits so long has no time to run. Raise request_timeout_s or lower queueTimeoutSeconds." .Values.gateway.queueTimeoutSeconds $requestTimeout) -}}
{{- end -}}
{{- $least := add .Values.gateway.preStopSeconds .Values.drainSeconds 10 -}}
{{- with .Values.gateway.terminationGracePeriodSeconds -}}
  {{- if lt (int .) (int $least) -}}
    {{- fail (printf "gateway.terminationGracePeriodSeconds (%d) is less than a gateway takes to stop: preStopSeconds (%d), drainSeconds (%d) and 10 s. Raise it to %d, lower preStopSeconds or drainSeconds, or set it to 0." (int .) (int $.Values.gateway.preStopSeconds) (int $.Values.drainSeconds) (int $least)) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.auth.apiKeys .Values.auth.apiKeysSecret -}}
  {{- fail "auth.apiKeys and auth.apiKeysSecret are both set, and only one can have the accepted keys. Put the entries of apiKeys into the Secret, or remove apiKeysSecret." -}}
{{- end -}}
{{- if and .Values.gateway.settings.admin_port (not .Values.auth.controlTokenSecret) -}}
  {{- fail "gateway.settings.admin_port opens the operators' API, which needs workers with a control service. Set auth.controlTokenSecret, or remove admin_port." -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.scaling" -}}
{{- $scopes := list (dict "at" "gateway" "values" .Values.gateway "cpu" true) -}}
{{- range $model := include "rootstock.models" . | fromJsonArray -}}
  {{- range $component := list "tokenizer" "detokenizer" "worker" -}}
    {{- $at := printf "%s of model %s" $component $model.name -}}
    {{- $scopes = append $scopes (dict "at" $at "values" (index $model $component) "cpu" (ne $component "worker")) -}}
  {{- end -}}
  {{- if $model.worker.prefill.autoscaling.enabled -}}
    {{- $scopes = append $scopes (dict "at" (printf "worker.prefill of model %s" $model.name) "values" $model.worker.prefill "cpu" false) -}}
  {{- end -}}
  {{- $worker := $model.worker -}}
  {{- if $worker.autoscaling.enabled -}}
    {{- if eq (int $worker.autoscaling.minReplicas) 0 -}}
      {{- include "rootstock.validate.fromZero" (dict "root" $ "model" $model) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $scopes -}}
  {{- if .values.autoscaling.enabled -}}
    {{- if gt (int .values.autoscaling.minReplicas) (int .values.autoscaling.maxReplicas) -}}
      {{- fail (printf "%s: autoscaling.minReplicas (%d) is above maxReplicas (%d). Lower minReplicas or raise maxReplicas." .at (int .values.autoscaling.minReplicas) (int .values.autoscaling.maxReplicas)) -}}
    {{- end -}}
    {{- if and .cpu (not (dig "requests" "cpu" "" .values.resources)) -}}
      {{- fail (printf "%s: autoscaling.targetCPUPercent is a share of resources.requests.cpu, which is not set. Set it, or switch autoscaling off." .at) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.prometheusAuth.modes (not .Values.autoscaling.prometheusAuth.secret) -}}
  {{- fail (printf "autoscaling.prometheusAuth.modes is %s, but prometheusAuth.secret is empty. Name the Secret with these credentials in prometheusAuth.secret, or remove modes." (join ", " .Values.autoscaling.prometheusAuth.modes)) -}}
{{- end -}}
{{- if and .Values.autoscaling.adapterRules.enabled (eq .Values.autoscaling.engine "keda") -}}
  {{- fail "autoscaling.adapterRules are for HorizontalPodAutoscalers, and autoscaling.engine is keda: two autoscalers must not drive the same workers. Set adapterRules.enabled to false, or engine to hpa." -}}
{{- end -}}
{{- end }}

{{/* Checks scaling from zero: requests must be able to wait for the start of a worker. Takes {root, model}. */}}
{{- define "rootstock.validate.fromZero" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $coldStart := int .model.worker.autoscaling.coldStartSeconds -}}
{{- if ne .root.Values.autoscaling.engine "keda" -}}
  {{- fail (printf "model %s: worker.autoscaling.minReplicas 0 needs autoscaling.engine keda; a HorizontalPodAutoscaler cannot scale from zero. Set engine to keda, or minReplicas to 1." .model.name) -}}
{{- end -}}
{{- if lt (int $gateway.queueTimeoutSeconds) $coldStart -}}
  {{- fail (printf "model %s: with worker.autoscaling.minReplicas 0 requests wait in the gateway until a worker has started, %d s, but gateway.queueTimeoutSeconds is %v. Raise queueTimeoutSeconds above coldStartSeconds, or set minReplicas to 1." .model.name $coldStart $gateway.queueTimeoutSeconds) -}}
{{- end -}}
{{- if and (hasKey $gateway.settings "max_waiting_requests") (eq (int $gateway.settings.max_waiting_requests) 0) -}}
  {{- fail (printf "model %s: with worker.autoscaling.minReplicas 0 requests wait in the gateway, but gateway.settings.max_waiting_requests is 0. Raise it, or set minReplicas to 1." .model.name) -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.modelCache" -}}
{{- $cache := .Values.modelCache -}}
{{- $models := include "rootstock.models" . | fromJsonArray -}}
{{- if and (eq $cache.type "hostPath") (not $cache.hostPath) -}}
  {{- fail "modelCache.type hostPath needs modelCache.hostPath, a folder that every node has." -}}
{{- end -}}
{{- if and (eq $cache.type "image") (not $cache.image.reference) -}}
  {{- fail "modelCache.type image needs modelCache.image.reference, an OCI image whose files are the models." -}}
{{- end -}}
{{- if $cache.prefetch.enabled -}}
  {{- $sources := 0 -}}
  {{- $folders := dict -}}
  {{- if ne $cache.type "pvc" -}}
    {{- fail (printf "modelCache.prefetch downloads into a volume that all pods see, and modelCache.type is %s. Set type to pvc, or prefetch.enabled to false." $cache.type) -}}
  {{- end -}}
  {{- range $model := $models -}}
    {{- if .source -}}
      {{- $sources = add1 $sources -}}
      {{- if not .cached -}}
        {{- fail (printf "model %s: the prefetch Job downloads to its path %s, which is not below modelCache.mountPath (%s). Change the path." .name .path $cache.mountPath) -}}
      {{- end -}}
      {{- with get $folders .path -}}
        {{- if ne . $model.source -}}
          {{- fail (printf "model %s: the prefetch Job would replace %s by %s, because another model with that source has the same path, %s. Give each source its own path." $model.name . $model.source $model.path) -}}
        {{- end -}}
      {{- end -}}
      {{- $_ := set $folders .path .source -}}
    {{- end -}}
  {{- end -}}
  {{- if not $sources -}}
    {{- fail "modelCache.prefetch.enabled: no entry of models has a source to download. Set models[].source to a hub id, or prefetch.enabled to false." -}}
  {{- end -}}
{{- end -}}
{{- if eq $cache.type "pvc" -}}
  {{- if and (eq $cache.pvc.accessMode "ReadOnlyMany") (or $cache.prefetch.enabled (not $cache.pvc.existingClaim)) -}}
    {{- fail "modelCache.pvc.accessMode ReadOnlyMany: no pod could write the models. Set accessMode to ReadWriteMany, or pvc.existingClaim to a volume that has them and prefetch.enabled to false." -}}
  {{- end -}}
  {{- if eq $cache.pvc.accessMode "ReadWriteOnce" -}}
    {{- range $model := $models -}}
      {{- range $component := ternary (list "worker") (list "tokenizer" "detokenizer" "worker") $cache.fetchTokenizers -}}
        {{- $values := index $model $component -}}
        {{- $many := ternary (gt (int $values.autoscaling.maxReplicas) 1) (gt (int $values.replicas) 1) $values.autoscaling.enabled -}}
        {{- $many = or $many (gt (int (dig "prefill" "replicas" 0 $values)) 0) (dig "prefill" "autoscaling" "enabled" false $values) -}}
        {{- if and $model.cached (or $many (gt (int (default 1 $values.hosts)) 1)) -}}
          {{- fail (printf "model %s: modelCache.pvc.accessMode ReadWriteOnce is a volume of one node, but %s has several replicas. Set accessMode to ReadWriteMany, or one replica of everything on one node (tokenizers need no volume with fetchTokenizers)." $model.name $component) -}}
        {{- end -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $cached := 0 -}}
{{- range $models -}}
  {{- if .cached }}{{ $cached = add1 $cached }}{{ end -}}
  {{- $fetched := and .cached (or .filled $cache.prefetch.enabled $cache.fetchTokenizers (eq $cache.type "pod")) -}}
  {{- if and .source (not $fetched) -}}
    {{- fail (printf "model %s: its source %s would not be downloaded. Set modelCache.type to pod, or to pvc with modelCache.prefetch.enabled, and its path below modelCache.mountPath (%s); or leave the source out." .name .source $cache.mountPath) -}}
  {{- end -}}
{{- end -}}
{{- if and (ne $cache.type "none") (not $cached) -}}
  {{- fail (printf "modelCache.type is %s, but no model has a path in the cache. Set models[].path below modelCache.mountPath (%s), or to the mount path if an image, a hostPath or an existingClaim has one model only; or set type to none." $cache.type $cache.mountPath) -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.tls" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.secret $tls.certManager.enabled -}}
  {{- fail "tls.secret and tls.certManager.enabled are both set: only one can issue the certificates. Remove secret, or set enabled to false." -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
  {{- fail "tls.certManager.issuerRef.name is empty. Name an Issuer or a ClusterIssuer that signs only this release's services (docs/how-to/kubernetes/security.md), or set enabled to false." -}}
{{- end -}}
{{- $spans := $tls.certManager -}}
{{- if and $spans.enabled (ge (include "rootstock.seconds" $spans.renewBefore | int64) (include "rootstock.seconds" $spans.duration | int64)) -}}
  {{- fail (printf "tls.certManager.renewBefore (%s) must be less than its duration (%s): cert-manager refuses such a Certificate. Set it to a third of duration, for example." $spans.renewBefore $spans.duration) -}}
{{- end -}}
{{- if and (or $tls.tokenSecret $tls.caConfigMap) (not (include "rootstock.tls" .)) -}}
  {{- fail "tls.tokenSecret and tls.caConfigMap apply to TLS between services, which is off. Set tls.secret or tls.certManager.enabled, or remove them." -}}
{{- end -}}
{{- range $name := list "redis" "state" -}}
  {{- $redis := index $.Values $name -}}
  {{- if and $redis.externalTlsSecret (not $redis.externalUrlSecret) -}}
    {{- fail (printf "%s.externalTlsSecret needs %s.externalUrlSecret, which is empty. Set externalUrlSecret, or remove externalTlsSecret." $name $name) -}}
  {{- end -}}
{{- end -}}
{{- end }}

{{- define "rootstock.validate.edges" -}}
{{- if and (not .Values.redis.embedded) (not .Values.redis.externalUrlSecret) -}}
  {{- fail "redis.embedded is false and redis.externalUrlSecret is empty. Name a Secret whose key `url` holds redis://…, or set embedded to true." -}}
{{- end -}}
{{- if and .Values.redis.embedded .Values.redis.externalUrlSecret -}}
  {{- fail "redis.embedded and redis.externalUrlSecret are both set: only one Redis is used. Set embedded to false, or remove externalUrlSecret." -}}
{{- end -}}
{{- if and .Values.state.embedded .Values.state.externalUrlSecret -}}
  {{- fail "state.embedded and state.externalUrlSecret are both set: only one Redis is used. Set embedded to false, or remove externalUrlSecret." -}}
{{- end -}}
{{- range $name := list "redis" "state" -}}
  {{- $server := index $.Values $name -}}
  {{- $limit := dig "limits" "memory" "" $server.resources -}}
  {{- if and $server.embedded $limit (gt (mulf 1.25 (include "rootstock.redis.bytes" $server.maxMemory | float64)) (include "rootstock.bytes" $limit | float64)) -}}
    {{- fail (printf "%s.maxMemory is %s, and %s.resources.limits.memory is %s: the server would exceed its memory limit before it reaches maxMemory, and again after each restart. Set the limit a quarter above maxMemory, or lower maxMemory." $name $server.maxMemory $name (toString $limit)) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.state.volume.existingClaim (ne .Values.state.volume.type "pvc") -}}
  {{- fail "state.volume.existingClaim is set, but state.volume.type is not pvc. Set type to pvc, or remove existingClaim." -}}
{{- end -}}
{{- $service := .Values.gateway.service -}}
{{- range $key, $types := dict "externalTrafficPolicy" (list "LoadBalancer" "NodePort") "loadBalancerClass" (list "LoadBalancer") -}}
  {{- if and (index $service $key) (not (has $service.type $types)) -}}
    {{- fail (printf "gateway.service.%s applies to Services of type %s, and gateway.service.type is %s: Kubernetes refuses it. Change type, or remove %s." $key (join " or " $types) $service.type $key) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
  {{- fail "ingress.enabled: ingress.hosts is empty. Add an entry like {host: llm.example.com, path: /}, or set enabled to false." -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.annotations) -}}
  {{- range .Values.ingress.hosts -}}
    {{- if not (regexMatch "^/(v1(/.*)?)?$" (default "/" .path)) -}}
      {{- fail (printf "ingress.hosts: the path %s of %s would reach the gateway unchanged, and the gateway's paths begin at /. Set path to / or below /v1, or have the controller strip it, by ingress.annotations." .path .host) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
  {{- fail "httpRoute.enabled: httpRoute.parentRefs is empty. Add the Gateway, like {name: gateway, namespace: infra}, or set enabled to false." -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
  {{- fail "serviceAccount.create is false and serviceAccount.name is empty: the namespace's default account would get the chart's rights. Name an account, or set create to true." -}}
{{- end -}}
{{- end }}
