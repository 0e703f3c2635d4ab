{{/* All objects of a component; of (root, kind) and, for workers, (group, groupValues). */}}
{{- define "penstock.component" -}}
{{- $values := mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy (index .root.Values .kind)) (deepCopy (.groupValues | default dict)) -}}
{{- $name := compact (list (include "penstock.fullname" .root) .kind .group) | join "-" -}}
{{- $c := dict "root" .root "kind" .kind "group" .group "values" $values "fullname" $name -}}
{{- $isGroup := and (eq .kind "worker") (gt (int ($values.tensorParallelSize | default 1)) 1) -}}
{{- $_ := set $c "isGroup" $isGroup -}}
{{- if and $values.autoscaling.enabled $values.keda.enabled -}}
{{- fail (printf "%s: autoscaling and keda are both enabled, but KEDA makes the HorizontalPodAutoscaler itself: enable one of them" .kind) -}}
{{- end -}}
{{- if and $values.podMonitor.enabled $values.serviceMonitor.enabled -}}
{{- fail (printf "%s: podMonitor and serviceMonitor are both enabled, which would scrape every pod twice: enable one of them" .kind) -}}
{{- end -}}
{{- if $isGroup }}
{{ include "penstock.leaderWorkerSet" $c }}
{{- else }}
{{ include "penstock.deployment" $c }}
{{- end }}
---
{{ include "penstock.componentPolicy" $c }}
{{- if $values.serviceAccount.create }}
---
{{ include "penstock.serviceAccount" $c }}
{{- end }}
{{- if $values.pdb.enabled }}
---
{{ include "penstock.disruptionBudget" $c }}
{{- end }}
{{- if $values.autoscaling.enabled }}
---
{{ include "penstock.autoscaler" $c }}
{{- end }}
{{- if $values.keda.enabled }}
---
{{ include "penstock.scaledObject" $c }}
{{- end }}
{{- if $values.podMonitor.enabled }}
---
{{ include "penstock.podMonitor" $c }}
{{- end }}
{{- if or $values.serviceMonitor.enabled (eq .kind "gateway") }}
---
{{ include "penstock.metricsService" $c }}
{{- end }}
{{- if $values.serviceMonitor.enabled }}
---
{{ include "penstock.serviceMonitor" $c }}
{{- end }}
{{- end }}

{{/* Metadata of an object of a component; of (root, kind, group, fullname). */}}
{{- define "penstock.metadata" -}}
metadata:
  name: {{ .fullname }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "penstock.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .kind }}
    {{- with .group }}
    penstock/worker-group: {{ . }}
    {{- end }}
{{- end }}

{{- define "penstock.deployment" -}}
apiVersion: apps/v1
kind: Deployment
{{ include "penstock.metadata" . }}
spec:
  {{- if not (or .values.autoscaling.enabled .values.keda.enabled) }}
  replicas: {{ int .values.replicas }}
  {{- end }}
  revisionHistoryLimit: 3
  {{- with .values.strategy }}
  strategy:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
  template:
    {{- include "penstock.pod" . | nindent 4 }}
{{- end }}

{{/* Ranks can only begin together, so the group starts anew with any of its pods. */}}
{{- define "penstock.leaderWorkerSet" -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{ include "penstock.metadata" . }}
spec:
  {{- if not (or .values.autoscaling.enabled .values.keda.enabled) }}
  replicas: {{ int .values.replicas }}
  {{- end }}
  rolloutStrategy:
    {{- $strategy := .values.strategy | default (dict "type" "RollingUpdate") -}}
    {{- if $strategy.rollingUpdate -}}
    {{- $strategy = mergeOverwrite (dict) (omit $strategy "rollingUpdate") (dict "rollingUpdateConfiguration" $strategy.rollingUpdate) -}}
    {{- end -}}
    {{- toYaml $strategy | nindent 4 }}
  leaderWorkerTemplate:
    size: {{ int .values.tensorParallelSize }}
    restartPolicy: RecreateGroupOnPodRestart
    workerTemplate:
      {{- include "penstock.pod" . | nindent 6 }}
{{- end }}

{{- define "penstock.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
{{ include "penstock.metadata" (mergeOverwrite (deepCopy (omit . "root")) (dict "root" .root "fullname" (.values.serviceAccount.name | default .fullname))) }}
  {{- with .values.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{- define "penstock.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
{{ include "penstock.metadata" . }}
spec:
  maxUnavailable: {{ .values.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
{{- end }}

{{/* What scalers change; of a component. */}}
{{- define "penstock.scaleTarget" -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" .isGroup }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" .isGroup }}
name: {{ .fullname }}
{{- end }}

{{- define "penstock.autoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
{{ include "penstock.metadata" . }}
spec:
  scaleTargetRef:
    {{- include "penstock.scaleTarget" . | nindent 4 }}
  minReplicas: {{ int .values.autoscaling.minReplicas }}
  maxReplicas: {{ int .values.autoscaling.maxReplicas }}
  {{- with .values.autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  metrics:
    {{- with int .values.autoscaling.targetCPUUtilizationPercentage }}
    - type: Resource
      resource:
        name: cpu
        target: {type: Utilization, averageUtilization: {{ . }}}
    {{- end }}
    {{- with .values.autoscaling.metrics }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The metrics of each pod; the gateways' also for who reads them without a Prometheus. */}}
{{- define "penstock.metricsService" -}}
apiVersion: v1
kind: Service
{{ include "penstock.metadata" (mergeOverwrite (deepCopy (omit . "root")) (dict "root" .root "fullname" (printf "%s-metrics" .fullname))) }}
spec:
  clusterIP: None
  selector:
    {{- include "penstock.selector" . | nindent 4 }}
  ports:
    - {name: metrics, port: 9100, targetPort: metrics}
{{- end }}

{{- define "penstock.podMonitor" -}}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
{{ include "penstock.metadata" . }}
    {{- with .values.podMonitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
  podTargetLabels: [app.kubernetes.io/instance, app.kubernetes.io/component]
  podMetricsEndpoints:
    {{- include "penstock.scraped" (dict "root" .root "monitor" .values.podMonitor) | nindent 4 }}
{{- end }}

{{- define "penstock.serviceMonitor" -}}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
{{ include "penstock.metadata" . }}
    {{- with .values.serviceMonitor.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "penstock.selector" . | nindent 6 }}
  podTargetLabels: [app.kubernetes.io/instance, app.kubernetes.io/component]
  endpoints:
    {{- include "penstock.scraped" (dict "root" .root "monitor" .values.serviceMonitor) | nindent 4 }}
{{- end }}

{{/* How a pod is scraped, whoever finds it; of (root, monitor). */}}
{{- define "penstock.scraped" -}}
- port: metrics
  interval: {{ .monitor.interval }}
  {{- if .root.Values.tls.existingSecret }}
  scheme: https
  tlsConfig: {insecureSkipVerify: true}
  {{- end }}
  {{- with .root.Values.auth.metricsToken }}
  {{- if .existingSecret }}
  authorization:
    credentials: {name: {{ .existingSecret }}, key: {{ .key }}}
  {{- end }}
  {{- end }}
  {{- with .monitor.relabelings }}
  relabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .monitor.metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
