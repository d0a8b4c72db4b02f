{{/* JSON with the expected state of the release, which scripts/diagnosis/install.py reads. Takes the root. */}}
{{- define "rootstock.diagnosis.install" -}}
{{- $full := include "rootstock.fullname" . -}}
{{- $gateway := dict "root" . "component" "gateway" -}}
{{- $services := dict (include "rootstock.host" $gateway) (dict "http" .Values.gateway.service.port) -}}
{{- $grpc := dict "tokenizer" (list 7001 9101) "detokenizer" (list 7002 9102) -}}
{{- $models := list -}}
{{- $names := list -}}
{{- $slugs := list -}}
{{- $claims := list -}}
{{- range $pool := include "rootstock.workerPools" . | fromJsonArray -}}
  {{- $least := ternary .values.autoscaling.minReplicas .values.replicas .values.autoscaling.enabled -}}
  {{- $sleeps := eq (int $least) 0 -}}
  {{- if not $sleeps -}}{{- $_ := set $grpc (default "worker" .pool) (list 7003 9103) -}}{{- end -}}
  {{- if ne .mode "prefill" -}}
    {{- $models = append $models (dict "name" .model.name "slug" .model.slug "sleeps" $sleeps "gpus" (int .values.gpus) "runtimeClass" .values.runtimeClassName) -}}
  {{- end -}}
  {{- if .values.autoscaling.enabled -}}
    {{- $names = append $names (include "rootstock.componentName" (set $pool "root" $)) -}}
    {{- if ne .mode "prefill" -}}{{- $slugs = append $slugs .model.slug -}}{{- end -}}
  {{- end -}}
  {{- if and .model.cached (eq $.Values.modelCache.type "pvc") -}}
    {{- $claim := default (printf "%s-models" $full) $.Values.modelCache.pvc.existingClaim -}}
    {{- $claims = list (dict "name" $claim "value" "modelCache.pvc.existingClaim") -}}
  {{- end -}}
{{- end -}}
{{- range $component := list "gateway" "tokenizer" "detokenizer" -}}
  {{- range $model := ternary (list (dict)) (include "rootstock.models" $ | fromJsonArray) (eq $component "gateway") -}}
    {{- $values := ternary $.Values.gateway (index $model $component) (eq $component "gateway") -}}
    {{- if $values.autoscaling.enabled -}}
      {{- $names = append $names (include "rootstock.componentName" (dict "root" $ "component" $component "model" $model)) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $component, $ports := $grpc -}}
  {{- $_ := set $services (include "rootstock.host" (dict "root" $ "component" $component)) (dict "grpc" (index $ports 0) "metrics" (index $ports 1)) -}}
{{- end -}}
{{- $redis := list "index" -}}
{{- if .Values.redis.embedded -}}{{- $_ := set $services (include "rootstock.host" (dict "root" . "component" "redis")) (dict "redis" 6379) -}}{{- end -}}
{{- if .Values.state.embedded -}}{{- $_ := set $services (include "rootstock.host" (dict "root" . "component" "state")) (dict "redis" 6379) -}}{{- end -}}
{{- if or .Values.state.embedded .Values.state.externalUrlSecret -}}{{- $redis = append $redis "state" -}}{{- end -}}
{{- if and .Values.state.embedded .Values.state.volume.existingClaim -}}
  {{- $claims = append $claims (dict "name" .Values.state.volume.existingClaim "value" "state.volume.existingClaim") -}}
{{- end -}}
{{- $auth := .Values.autoscaling.prometheusAuth -}}
{{- $sure := or (eq .Values.autoscaling.engine "keda") (ne .Values.autoscaling.prometheusUrl "http://prometheus-server.monitoring.svc:80") (gt (len $auth.modes) 0) -}}
{{- dict
  "release" $full
  "instance" .Release.Name
  "namespace" .Release.Namespace
  "services" $services
  "secrets" (include "rootstock.diagnosis.secrets" . | fromJsonArray)
  "models" $models
  "claims" $claims
  "redis" $redis
  "scrapes" (eq (include "rootstock.scrapes" .) "true")
  "prometheus" .Values.autoscaling.prometheusUrl
  "sure" $sure
  "unshown" (coalesce $auth.podIdentity (ternary "tls" "" (has "tls" $auth.modes)))
  "headers" .Values.autoscaling.prometheusAuth.headers
  "scaled" (dict "engine" .Values.autoscaling.engine "names" $names "metric" (include "rootstock.backlogMetric" .) "selector" (ternary (printf "namespace=%s,model=%s" .Release.Namespace (first (append $slugs ""))) "" (gt (len $slugs) 0)))
  "policies" .Values.networkPolicy.enabled | toJson -}}
{{- end }}

{{/* JSON list of {name, keys, value, part}: each Secret that values name, once. keys: the required keys, or empty if the Secret must only
exist; value: the values that name it; part: the test may read only these keys. Takes the root. */}}
{{- define "rootstock.diagnosis.secrets" -}}
{{- $root := . -}}
{{- $pair := list "tls.crt" "tls.key" -}}
{{- $prometheus := list -}}
{{- $keys := dict "bearer" (list "bearerToken") "basic" (list "username" "password") "tls" (list "cert" "key") "custom" (list "customAuthHeader" "customAuthValue") -}}
{{- range .Values.autoscaling.prometheusAuth.modes -}}{{- $prometheus = concat $prometheus (index $keys .) -}}{{- end -}}
{{- $fetches := .Values.modelCache.prefetch.enabled -}}
{{- range list "tokenizer" "worker" -}}
  {{- if include "rootstock.anyFetches" (dict "root" $root "component" .) -}}{{- $fetches = true -}}{{- end -}}
{{- end -}}
{{- $prefetch := ternary .Values.modelCache.prefetch (dict "s3" dict "gcs" dict) $fetches -}}
{{- $all := list
  (dict "name" .Values.auth.apiKeysSecret "keys" (list "*.json") "value" "auth.apiKeysSecret")
  (dict "name" .Values.auth.controlTokenSecret "keys" (list "token") "value" "auth.controlTokenSecret")
  (dict "name" (ternary "" .Values.redis.externalUrlSecret .Values.redis.embedded) "keys" (list "url") "value" "redis.externalUrlSecret")
  (dict "name" (ternary "" .Values.state.externalUrlSecret .Values.state.embedded) "keys" (list "url") "value" "state.externalUrlSecret")
  (dict "name" (ternary .Values.redis.passwordSecret "" .Values.redis.embedded) "keys" (list "password") "value" "redis.passwordSecret")
  (dict "name" .Values.tls.tokenSecret "keys" (list "token") "value" "tls.tokenSecret")
  (dict "name" (ternary "" .Values.redis.externalTlsSecret .Values.redis.embedded) "keys" list "value" "redis.externalTlsSecret")
  (dict "name" (ternary "" .Values.state.externalTlsSecret .Values.state.embedded) "keys" list "value" "state.externalTlsSecret")
  (dict "name" (ternary .Values.state.passwordSecret "" .Values.state.embedded) "keys" (list "password") "value" "state.passwordSecret")
  (dict "name" $prefetch.tokenSecret "keys" (list "token") "value" "modelCache.prefetch.tokenSecret")
  (dict "name" $prefetch.s3.secret "keys" (list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY") "value" "modelCache.prefetch.s3.secret")
  (dict "name" $prefetch.gcs.secret "keys" (list "key.json") "value" "modelCache.prefetch.gcs.secret")
  (dict "name" .Values.gateway.tlsSecret "keys" $pair "value" "gateway.tlsSecret")
  (dict "name" .Values.tests.keySecret "keys" (list "key" "helm-test.json") "value" "tests.keySecret")
  (dict "name" .Values.autoscaling.prometheusAuth.secret "keys" $prometheus "value" "autoscaling.prometheusAuth.secret") -}}
{{- range include "rootstock.models" . | fromJsonArray -}}
  {{- $all = append $all (dict "name" .worker.kvTlsSecret "keys" (append $pair "ca.crt") "value" "worker.kvTlsSecret") -}}
  {{- $all = append $all (dict "name" .worker.kvTiers.shared.secret "keys" (list "url" "secret") "value" "worker.kvTiers.shared.secret" "part" true) -}}
{{- end -}}
{{- if include "rootstock.tls" . -}}
  {{- $value := ternary "tls.certManager" "tls.secret" .Values.tls.certManager.enabled -}}
  {{- $authority := ternary (list "ca.crt") list (.Values.tls.caConfigMap | empty) -}}
  {{- $absent := dict "redis" (not .Values.redis.embedded) "state" (not .Values.state.embedded) -}}
  {{- range $component := list "gateway" "tokenizer" "detokenizer" "worker" "redis" "state" -}}
    {{- /* The test uses a gateway's certificate, so it reads no private key of other components. */ -}}
    {{- $seen := ternary $pair (list "tls.crt") (eq $component "gateway") -}}
    {{- $of := dict "name" (include "rootstock.tls.secret" (dict "root" $root "component" $component)) "keys" (concat $seen $authority) "value" $value "part" (ne $component "gateway") -}}
    {{- if not (dig $component false $absent) -}}{{- $all = append $all $of -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- $named := list -}}
{{- $seen := dict -}}
{{- range $each := $all -}}
  {{- if not .name -}}{{- continue -}}{{- end -}}
  {{- $of := index $seen .name -}}
  {{- if $of -}}
    {{- $_ := set $of "keys" (concat $of.keys .keys | uniq) -}}
    {{- $_ := set $of "value" (splitList ", " $of.value | concat (list .value) | uniq | sortAlpha | join ", ") -}}
    {{- $_ := set $of "part" (and $of.part (default false .part)) -}}
  {{- else -}}
    {{- $of = merge (dict) . (dict "part" false) -}}
    {{- $_ := set $seen .name $of -}}
    {{- $named = append $named $of -}}
  {{- end -}}
{{- end -}}
{{- toJson $named -}}
{{- end }}

{{/* URLs of the Redis servers. The Secrets are optional, so that the pod starts without them and reports them. Takes the root. */}}
{{- define "rootstock.diagnosis.redisEnv" -}}
{{- if .Values.redis.embedded }}
- name: INDEX_PASSWORD
  {{- include "rootstock.diagnosis.passwordFrom" (dict "root" . "component" "redis") | nindent 2 }}
- name: ROOTSTOCK_REDIS_URL
  value: {{ include "rootstock.tls.redisUrl" (dict "root" . "component" "redis" "password" "INDEX_PASSWORD") | quote }}
{{- else }}
- name: ROOTSTOCK_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.externalUrlSecret }}, key: url, optional: true}
{{- end }}
{{- if .Values.state.embedded }}
- name: REDISCLI_AUTH
  {{- include "rootstock.diagnosis.passwordFrom" (dict "root" . "component" "state") | nindent 2 }}
- name: ROOTSTOCK_STATE_REDIS_URL
  value: {{ include "rootstock.tls.redisUrl" (dict "root" . "component" "state" "password" "REDISCLI_AUTH") | quote }}
{{- else if .Values.state.externalUrlSecret }}
- name: ROOTSTOCK_STATE_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ .Values.state.externalUrlSecret }}, key: url, optional: true}
{{- end }}
{{- end }}

{{/* Like rootstock.passwordFrom, but the Secret may be missing. */}}
{{- define "rootstock.diagnosis.passwordFrom" -}}
{{- $from := include "rootstock.passwordFrom" . | fromYaml -}}
{{- $_ := set $from.valueFrom.secretKeyRef "optional" true -}}
{{- toYaml $from -}}
{{- end }}
