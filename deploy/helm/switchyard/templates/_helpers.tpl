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

{{/* Number of control planes. */}}
{{- define "switchyard.controlPlaneCount" -}}
{{- $values := .Values.controlPlane -}}
{{- $count := int $values.count -}}
{{- if eq $values.store "etcd" -}}
{{- default 3 $count -}}
{{- else if $values.etcd.endpoints -}}
{{- fail "controlPlane.etcd.endpoints needs controlPlane.store=etcd" -}}
{{- else if gt $count 1 -}}
{{- fail (printf "controlPlane.count=%d needs controlPlane.store=etcd: the embedded store belongs to one process" $count) -}}
{{- else -}}
1
{{- end -}}
{{- end -}}

{{/* Nothing, after checks of the keys of tokens. */}}
{{- define "switchyard.checkTokens" -}}
{{- if and .Values.token.clusterKey (not .Values.token.rolesKey) }}
{{- fail "token.clusterKey needs token.rolesKey: without roles the key `token` has the cluster's token" }}
{{- end }}
{{- if and .Values.token.rolesKey (has .Values.token.clusterKey (list "token" .Values.token.rolesKey)) }}
{{- fail (printf "token.clusterKey=%s is not a key of its own: servers would have every role" .Values.token.clusterKey) }}
{{- end }}
{{- end -}}

{{/* Address of the pod for a URL. */}}
{{- define "switchyard.podIp" -}}
{{- ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.ipFamily "IPv6") -}}
{{- end -}}

{{/* Variables of a control plane on etcd, after checks of their values. */}}
{{- define "switchyard.etcdEnv" -}}
{{- $etcd := .Values.controlPlane.etcd -}}
{{- if not $etcd.endpoints }}
{{- fail "controlPlane.store=etcd needs controlPlane.etcd.endpoints, such as https://etcd-0.etcd.databases.svc:2379" }}
{{- end }}
{{- range $etcd.endpoints }}
{{- if hasPrefix "https://" . }}
{{- if not $etcd.tlsSecret }}
{{- fail (printf "%s needs controlPlane.etcd.tlsSecret, a Secret with the authority of etcd under ca.crt" .) }}
{{- end }}
{{- else if not $etcd.insecure }}
{{- fail (printf "%s is plain text: use https, or set controlPlane.etcd.insecure=true" .) }}
{{- end }}
{{- end }}
{{- if ne (empty $etcd.user) (empty $etcd.passwordSecret) }}
{{- fail "set both controlPlane.etcd.user and controlPlane.etcd.passwordSecret, or neither" }}
{{- end }}
{{- if and $etcd.clientCertificate (not $etcd.tlsSecret) }}
{{- fail "controlPlane.etcd.clientCertificate needs controlPlane.etcd.tlsSecret" }}
{{- end }}
{{- if and .Values.token.rolesKey (not .Values.token.clusterKey) }}
{{- fail "token.rolesKey with controlPlane.store=etcd needs token.clusterKey: control planes know each other by that token" }}
{{- end }}
- name: SWITCHYARD_STORE
  value: etcd
- name: SWITCHYARD_ETCD_ENDPOINTS
  value: {{ join "," $etcd.endpoints | quote }}
- name: SWITCHYARD_ETCD_PREFIX
  value: {{ default (printf "/switchyard/%s/%s" .Release.Namespace .Release.Name) $etcd.prefix | quote }}
- name: SWITCHYARD_ETCD_LEASE_S
  value: {{ $etcd.leaseSeconds | int | quote }}
{{- if $etcd.insecure }}
- name: SWITCHYARD_ETCD_INSECURE
  value: "true"
{{- end }}
{{- with $etcd.user }}
- name: SWITCHYARD_ETCD_USER
  value: {{ . | quote }}
- name: SWITCHYARD_ETCD_PASSWORD_FILE
  value: /etcd-password/password
{{- end }}
{{- if $etcd.tlsSecret }}
- name: SWITCHYARD_ETCD_CA
  value: /etcd-tls/ca.crt
{{- if $etcd.clientCertificate }}
- name: SWITCHYARD_ETCD_CERT
  value: /etcd-tls/tls.crt
- name: SWITCHYARD_ETCD_KEY
  value: /etcd-tls/tls.key
{{- end }}
{{- end }}
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
