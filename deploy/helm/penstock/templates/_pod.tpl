{{/* The pod of a component; of (root, kind, group, values, fullname). */}}

{{/* Seconds until a pod is killed: never before its drain is over. */}}
{{- define "penstock.grace" -}}
{{- $least := add (int .values.preStopSleepSeconds) (ceil (index .values.settings "drain-timeout-s")) 15 -}}
{{- $grace := .values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $grace -}}
{{- $least -}}
{{- else if lt (int $grace) (int $least) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d, but preStopSleepSeconds, the drain (settings.drain-timeout-s) and 15 more are %d: no pod may be killed while it drains" .kind (int $grace) (int $least)) -}}
{{- else -}}
{{- int $grace -}}
{{- end -}}
{{- end }}

{{/* Secrets that are mounted, as a YAML list of (name, secret, key, path); of (root, kind). */}}
{{- define "penstock.secrets" -}}
{{- $values := .root.Values -}}
{{- with include "penstock.redisPasswordSecret" .root }}
- {name: redis-password, secret: {{ . | quote }}, key: {{ ternary "services" $values.redis.passwordSecret.key $values.valkey.enabled | quote }}, path: password}
{{- end }}
{{- with fromJson (include "penstock.redisTls" .root) }}
{{- if .existingSecret }}
- {name: redis-tls, secret: {{ .existingSecret | quote }}{{ if not (or .certKey .keyKey) }}, key: {{ .caKey | quote }}, path: {{ .caKey | quote }}{{ end }}}
{{- end }}
{{- end }}
{{- with $values.auth.controlToken }}
{{- if .existingSecret }}
- {name: control-token, secret: {{ .existingSecret | quote }}, key: {{ .key | quote }}, path: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- with $values.auth.metricsToken }}
{{- if .existingSecret }}
- {name: metrics-token, secret: {{ .existingSecret | quote }}, key: {{ .key | quote }}, path: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- with $values.tls.existingSecret }}
- {name: tls, secret: {{ . | quote }}}
{{- end }}
{{- with $values.auth.apiKeys }}
{{- if and .existingSecret (eq $.kind "gateway") }}
- {name: api-keys, secret: {{ .existingSecret | quote }}, key: {{ .key | quote }}, path: {{ .key | quote }}}
{{- end }}
{{- end }}
{{- if eq .kind "gateway" }}
{{ include "penstock.poolSecrets" .root }}
{{- end }}
{{- end }}

{{/* A probe of the health port; of (protocol, path, service, more). */}}
{{- define "penstock.probe" -}}
{{- if eq .protocol "grpc" -}}
grpc: {port: 8081, service: {{ .service | quote }}}
{{- else -}}
httpGet: {port: health, path: {{ .path }}}
{{- end }}
{{ toYaml .more }}
{{- end }}

{{- define "penstock.pod" -}}
{{- $values := .values -}}
{{- $hasModel := has .kind (list "tokenizer" "detokenizer" "worker") -}}
{{- $isWorker := eq .kind "worker" -}}
{{- $isGroup := and $isWorker (gt (int ($values.tensorParallelSize | default 1)) 1) -}}
{{- $secrets := fromYamlArray (include "penstock.secrets" .) -}}
{{- $processName := ternary "$(WORKER_SET)-$(WORKER_INDEX)" "$(POD_NAME)" $isGroup -}}
metadata:
  labels:
    {{- mergeOverwrite (deepCopy $values.podLabels) (fromYaml (include "penstock.selector" .)) | toYaml | nindent 4 }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ $values.serviceAccount.name | default (ternary .fullname "default" $values.serviceAccount.create) }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "penstock.grace" . }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- toYaml $values.podSecurityContext | nindent 4 }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- if $values.topologySpreadConstraints }}
    {{- toYaml $values.topologySpreadConstraints | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "penstock.selector" . | nindent 10 }}
    {{- end }}
  {{- with $values.initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .kind }}
      image: {{ include "penstock.image" (dict "root" .root "image" $values.image "tag" .root.Chart.AppVersion) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python, -m, {{ .kind }}_svc]
      args:
        {{- include "penstock.arguments" (merge (dict "processName" $processName) .) | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        {{- if $isGroup }}
        - name: WORKER_SET
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/name']"}}
        - name: WORKER_INDEX
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
        {{- end }}
        - name: HOME
          value: /tmp
        {{- include "penstock.redisVariable" .root | nindent 8 }}
        {{- if $hasModel }}
        {{- include "penstock.modelVariables" .root | nindent 8 }}
        {{- end }}
        {{- if $isWorker }}
        {{- range $variable, $folder := dict "XDG_CACHE_HOME" "" "TRITON_CACHE_DIR" "/triton" "TORCHINDUCTOR_CACHE_DIR" "/inductor" "QUACK_CACHE_DIR" "/quack" "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR" "/flash-attn" "CUDA_CACHE_PATH" "/cuda" }}
        - {name: {{ $variable }}, value: /var/cache/penstock{{ $folder }}}
        {{- end }}
        {{- end }}
        {{- with $values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if eq .kind "gateway" }}
        - {name: http, containerPort: 8000}
        {{- end }}
        - {name: grpc, containerPort: 50051}
        - {name: metrics, containerPort: 9100}
        - {name: health, containerPort: 8081}
        {{- if $isGroup }}
        - {name: distributed, containerPort: {{ int $values.distributedPort }}}
        {{- end }}
      startupProbe:
        {{- include "penstock.probe" (dict "protocol" $values.probes.protocol "path" "/health" "service" "liveness" "more" $values.probes.startup) | nindent 8 }}
      livenessProbe:
        {{- include "penstock.probe" (dict "protocol" $values.probes.protocol "path" "/health" "service" "liveness" "more" $values.probes.liveness) | nindent 8 }}
      readinessProbe:
        {{- include "penstock.probe" (dict "protocol" $values.probes.protocol "path" "/ready" "service" "" "more" $values.probes.readiness) | nindent 8 }}
      {{- with int $values.preStopSleepSeconds }}
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ . | quote }}]}
      {{- end }}
      securityContext:
        {{- toYaml $values.securityContext | nindent 8 }}
      resources:
        {{- include "penstock.resources" (dict "values" $values "isWorker" $isWorker) | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- if and (eq .kind "gateway") .root.Values.pools }}
        - {name: pools, mountPath: /etc/penstock/pools, readOnly: true}
        {{- end }}
        {{- range $secrets }}
        - {name: {{ .name }}, mountPath: /etc/penstock/{{ .name }}, readOnly: true}
        {{- end }}
        {{- if $hasModel }}
        {{- include "penstock.modelMount" .root | nindent 8 }}
        {{- end }}
        {{- if $isWorker }}
        - {name: kernel-cache, mountPath: /var/cache/penstock}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $values.extraContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.tmpSizeLimit }}}
    {{- if and (eq .kind "gateway") .root.Values.pools }}
    - name: pools
      configMap: {name: {{ include "penstock.fullname" .root }}-pools}
    {{- end }}
    {{- range $secrets }}
    - name: {{ .name }}
      secret:
        secretName: {{ .secret }}
        defaultMode: 0440
        {{- if .key }}
        items: [{key: {{ .key | quote }}, path: {{ .path | quote }}}]
        {{- end }}
    {{- end }}
    {{- if $hasModel }}
    {{- include "penstock.modelVolume" .root | nindent 4 }}
    {{- end }}
    {{- if $isWorker }}
    - name: kernel-cache
      {{- if $values.kernelCache.existingClaim }}
      persistentVolumeClaim: {claimName: {{ $values.kernelCache.existingClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ $values.kernelCache.sizeLimit }}}
      {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shmSizeLimit }}}
    {{- end }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* GPUs beside what is asked for anyway; of (values, isWorker). */}}
{{- define "penstock.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if and .isWorker (gt (int .values.gpus) 0) -}}
{{- $gpus := dict .values.gpuResource (int .values.gpus) -}}
{{- $resources = mergeOverwrite $resources (dict "limits" $gpus) (dict "requests" (deepCopy $gpus)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}
