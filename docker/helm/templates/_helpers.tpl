{{/* Each takes (dict "root" $ "pool" NAME). */}}
{{- define "pool.name" -}}
{{ printf "%s-%s" .root.Release.Name .pool | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "pool.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: server
triton-batching/pool: {{ .pool }}
{{- end }}

{{- define "pool.labels" -}}
{{ include "pool.selector" . }}
{{ include "chart.labels" .root }}
{{- end }}

{{- define "envoy.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}-envoy
app.kubernetes.io/instance: {{ .root.Release.Name }}
triton-batching/pool: {{ .pool }}
{{- end }}

{{/* Takes $. */}}
{{- define "chart.labels" -}}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What every container of ours may do: nothing. */}}
{{- define "container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "pod.security" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile: { type: RuntimeDefault }
{{- end }}
