{{/* A pod of `helm test`. Takes {root, name, script, arguments}. */}}
{{- define "rootstock.test" -}}
{{- $scope := dict "root" .root "component" "test" "values" .root.Values.tests -}}
apiVersion: v1
kind: Pod
{{ include "rootstock.pod.template" (dict "scope" $scope "metadata" (include "rootstock.test.metadata" (merge (dict "scope" $scope) .)) "spec" (include "rootstock.test.pod" (merge (dict "scope" $scope) .))) }}
{{- end }}

{{- define "rootstock.test.metadata" -}}
name: {{ include "rootstock.fullname" .root }}-test-{{ .name }}
labels:
  {{- include "rootstock.labels" .scope | nindent 2 }}
annotations:
  helm.sh/hook: test
  helm.sh/hook-delete-policy: before-hook-creation
{{- end }}

{{- define "rootstock.test.pod" -}}
  {{- include "rootstock.pod.common" .scope | nindent 2 }}
  restartPolicy: Never
  containers:
    - name: test
      image: {{ include "rootstock.image" (dict "root" .root "image" .root.Values.tests.image) }}
      {{- with .root.Values.image.pullPolicy }}
      imagePullPolicy: {{ . }}
      {{- end }}
      command:
        - python
        - -c
        - |
          {{- .root.Files.Get .script | trim | nindent 10 }}
        - http{{ if .root.Values.gateway.tlsSecret }}s{{ end }}://{{ include "rootstock.host" (dict "root" .root "component" "gateway") }}:{{ .root.Values.gateway.service.port }}
        {{- range .arguments }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: HOME
          value: /tmp
        {{- with .root.Values.tests.keySecret }}
        - name: API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: key
        {{- end }}
      resources:
        requests: {cpu: 50m, memory: 64Mi}
        limits: {cpu: "1", memory: 256Mi}
{{- end }}
