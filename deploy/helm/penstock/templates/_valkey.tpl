{{/* What the pods of Valkey and of Sentinels have in common; of (root, kind, script, env, resources, ports, data). */}}
{{- define "penstock.valkeyPod" -}}
{{- $valkey := .root.Values.valkey -}}
metadata:
  labels:
    {{- mergeOverwrite (deepCopy $valkey.podLabels) (fromYaml (include "penstock.selector" .)) | toYaml | nindent 4 }}
  annotations:
    # A server reads script and settings when it starts.
    penstock/settings: {{ include "penstock.valkeySettings" .root | sha256sum | trunc 16 }}
    {{- with $valkey.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int $valkey.terminationGracePeriodSeconds }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $valkey.podSecurityContext | nindent 4 }}
  {{- with $valkey.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $valkey.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $valkey.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $valkey.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $valkey.topologySpreadConstraints }}
    {{- toYaml $valkey.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "penstock.selector" . | nindent 10 }}
    {{- end }}
  containers:
    - name: {{ .kind }}
      image: {{ include "penstock.image" (dict "root" .root "image" $valkey.image "tag" "") }}
      imagePullPolicy: {{ $valkey.image.pullPolicy }}
      command: [sh, /etc/penstock/valkey/{{ .kind }}.sh, start]
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: SELF
          value: $(POD_NAME).{{ include "penstock.fullname" .root }}-{{ .kind }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}:{{ .port }}
        - name: SENTINELS
          value: {{ include "penstock.sentinelAddresses" .root | quote }}
        - {name: PRIMARY_NAME, value: penstock}
        - {name: RUN_DIR, value: /run/valkey}
        - {name: HOME, value: /run/valkey}
        {{- if $valkey.auth.enabled }}
        - {name: PASSWORD_DIR, value: /etc/penstock/passwords}
        {{- end }}
        {{- if $valkey.tls.enabled }}
        - {name: TLS_DIR, value: /etc/penstock/valkey-tls}
        - {name: TLS_AUTH_CLIENTS, value: {{ ternary "yes" "no" $valkey.tls.clientCertificates | quote }}}
        {{- end }}
        {{- toYaml .env | nindent 8 }}
      ports:
        - {name: {{ .kind }}, containerPort: {{ .port }}}
      startupProbe:
        exec: {command: [sh, /etc/penstock/valkey/{{ .kind }}.sh, alive]}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 24
      livenessProbe:
        exec: {command: [sh, /etc/penstock/valkey/{{ .kind }}.sh, alive]}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        exec: {command: [sh, /etc/penstock/valkey/{{ .kind }}.sh, ready]}
        periodSeconds: 5
        timeoutSeconds: 10
      securityContext:
        {{- toYaml $valkey.securityContext | nindent 8 }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - {name: script, mountPath: /etc/penstock/valkey, readOnly: true}
        - {name: run, mountPath: /run/valkey}
        {{- if $valkey.auth.enabled }}
        - {name: passwords, mountPath: /etc/penstock/passwords, readOnly: true}
        {{- end }}
        {{- if $valkey.tls.enabled }}
        - {name: tls, mountPath: /etc/penstock/valkey-tls, readOnly: true}
        {{- end }}
        {{- if .data }}
        - {name: data, mountPath: /data}
        {{- end }}
  volumes:
    - name: script
      configMap: {name: {{ include "penstock.fullname" .root }}-valkey}
    - name: run
      emptyDir: {medium: Memory, sizeLimit: 8Mi}
    {{- if $valkey.auth.enabled }}
    - name: passwords
      secret:
        secretName: {{ include "penstock.valkeySecret" .root }}
        defaultMode: 0440
    {{- end }}
    {{- if $valkey.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ $valkey.tls.existingSecret }}
        defaultMode: 0440
    {{- end }}
    {{- if and .data (not $valkey.persistence.enabled) }}
    - name: data
      emptyDir: {}
    {{- end }}
{{- end }}

{{/* Files of the ConfigMap; of the root. */}}
{{- define "penstock.valkeySettings" -}}
connection.sh: |
  {{- .Files.Get "files/connection.sh" | nindent 2 }}
valkey.sh: |
  {{- .Files.Get "files/valkey.sh" | nindent 2 }}
sentinel.sh: |
  {{- .Files.Get "files/sentinel.sh" | nindent 2 }}
rights: |
  {{- .Files.Get "files/rights" | nindent 2 }}
settings: |
  maxmemory {{ .Values.valkey.maxmemory }}
  repl-backlog-size {{ .Values.valkey.replBacklogSize }}
  min-replicas-to-write {{ int .Values.valkey.minReplicasToWrite }}
  {{- range $name, $value := .Values.valkey.config }}
  {{ $name }} {{ include "penstock.text" $value }}
  {{- end }}
{{- end }}
