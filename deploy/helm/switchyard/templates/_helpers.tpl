{{- define "switchyard.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "switchyard.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "switchyard.selector" . }}
{{- end -}}

{{- define "switchyard.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "switchyard.serviceAccount" -}}
{{- default (include "switchyard.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "switchyard.secret" -}}
{{- default (printf "%s-token" (include "switchyard.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{/* Where servers find control planes. */}}
{{- define "switchyard.controlPlane" -}}
{{- $service := printf "%s-control" (include "switchyard.fullname" .) -}}
{{- if eq .Values.discovery "kubernetes" -}}
{{- printf "k8s://%s/%s:http" .Release.Namespace $service -}}
{{- else -}}
{{- printf "dns://%s:%d" $service (int .Values.controlPlane.port) -}}
{{- end -}}
{{- end -}}

{{- define "switchyard.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* Secrets with the certificates: both are empty, or none is. */}}
{{- define "switchyard.controlPlaneTls" -}}
{{- default .Values.tls.existingSecret .Values.tls.controlPlaneSecret -}}
{{- end -}}

{{- define "switchyard.expertServersTls" -}}
{{- default .Values.tls.existingSecret .Values.tls.expertServersSecret -}}
{{- end -}}

{{- define "switchyard.commonEnv" -}}
{{- $control := include "switchyard.controlPlaneTls" . -}}
{{- if ne (empty $control) (empty (include "switchyard.expertServersTls" .)) }}
{{- fail "set both tls.controlPlaneSecret and tls.expertServersSecret, or tls.existingSecret" }}
{{- end }}
{{- if $control }}
- name: SWITCHYARD_TLS
  value: /tls
{{- else if .Values.tls.insecure }}
- name: SWITCHYARD_INSECURE
  value: "1"
{{- else }}
{{- fail "set tls.existingSecret to a Secret with tls.crt, tls.key and ca.crt, or tls.insecure=true for plain text" }}
{{- end }}
- name: SWITCHYARD_LOG
  value: {{ .Values.log | quote }}
- name: SWITCHYARD_LOG_FORMAT
  value: json
{{- end -}}

{{- define "switchyard.scheme" -}}
{{- ternary "https" "http" (ne (include "switchyard.controlPlaneTls" .) "") -}}
{{- end -}}

{{/* Of a pod. The argument is the number of its user. */}}
{{- define "switchyard.podSecurity" -}}
{{- $user := int . -}}
runAsNonRoot: {{ ne $user 0 }}
runAsUser: {{ $user }}
runAsGroup: {{ $user }}
fsGroup: {{ $user }}
# Kubernetes walks through a whole volume of a model otherwise, at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}
