{{/* What the chart gives a program, and behind it what the values add, without two of one name: (list . "server" "Env" "extraEnv" "name"). */}}
{{- define "postern.further" -}}
{{- $root := index . 0 -}}
{{- $program := index . 1 -}}
{{- $key := index . 4 -}}
{{- $value := printf "%s.%s" $program (index . 3) -}}
{{- $own := include (printf "postern.%s%s" $program (index . 2)) $root -}}
{{- $own }}
{{- with index $root.Values $program (index . 3) }}
{{- $names := list -}}
{{- range $own | fromYamlArray }}{{ $names = append $names (index . $key) }}{{ end }}
{{- range . }}
{{- if has (index . $key) $names }}
{{- fail (printf "%s: %s is there already" $value (index . $key)) }}
{{- end }}
{{- $names = append $names (index . $key) }}
{{- end }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "postern.serverMounts" -}}
{{- include "postern.redirectMounts" (list . "server") }}
{{- if .Values.server.httpsCallers.enabled }}
- name: kubelet-client
  mountPath: /etc/postern/kubelet-client
  readOnly: true
{{- end }}
{{- if .Values.server.connect.enabled }}
- name: policy
  mountPath: /etc/postern/policy
  readOnly: true
{{- end }}
{{- end }}

{{- define "postern.serverVolumes" -}}
{{- include "postern.redirectVolumes" (list . "server") }}
{{- if .Values.server.httpsCallers.enabled }}
- name: kubelet-client
  secret:
    secretName: {{ .Values.server.httpsCallers.kubeletClientSecret }}
    optional: true
{{- end }}
{{- if .Values.server.connect.enabled }}
- name: policy
  configMap:
    name: tunnel-server-policy
{{- end }}
{{- end }}

{{- define "postern.redirectorMounts" -}}
{{- include "postern.redirectMounts" (list . "redirector") }}
{{- end }}

{{- define "postern.redirectorVolumes" -}}
{{- include "postern.redirectVolumes" (list . "redirector") }}
{{- end }}

{{/* (list . "server") */}}
{{- define "postern.redirectMounts" -}}
- name: state
  mountPath: /var/lib/postern/{{ index . 1 }}
# The programs are attached to its descriptor; nothing is written there. The pod's own cgroup, which has its limits, stays at
# /sys/fs/cgroup.
- name: cgroup
  mountPath: /host/cgroup
  readOnly: true
# The programs stay there while a killed {{ index . 1 }} is not back.
- name: bpf
  mountPath: /bpf/postern
{{- include "postern.tun" (list (index . 0) "mount") | nindent 0 }}
{{- end }}

{{- define "postern.redirectVolumes" -}}
{{- $paths := (index (index . 0).Values (index . 1)).hostPaths -}}
- name: state
  hostPath:
    path: {{ $paths.state }}
    type: DirectoryOrCreate
- name: cgroup
  hostPath:
    path: {{ $paths.cgroup }}
    type: Directory
- name: bpf
  hostPath:
    path: {{ $paths.bpf }}/postern
    type: DirectoryOrCreate
{{- include "postern.tun" (list (index . 0) "volume") | nindent 0 }}
{{- end }}

{{- define "postern.agentMounts" -}}
- name: state
  mountPath: /var/lib/postern/agent
{{- if .Values.agent.kubeletCredentials.enabled }}
- name: kubeconfig
  mountPath: {{ .Values.agent.kubeletCredentials.kubeconfig }}
  readOnly: true
# A folder, because the kubelet replaces the certificate when it renews it.
- name: kubelet-pki
  mountPath: {{ .Values.agent.kubeletCredentials.pki }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "postern.agentVolumes" -}}
# On the node: a new pod continues with the certificate, the servers and the session number of the last one.
- name: state
  hostPath:
    path: {{ .Values.agent.hostPaths.state }}
    type: DirectoryOrCreate
{{- if .Values.agent.kubeletCredentials.enabled }}
- name: kubeconfig
  hostPath:
    path: {{ .Values.agent.kubeletCredentials.kubeconfig }}
    type: File
- name: kubelet-pki
  hostPath:
    path: {{ .Values.agent.kubeletCredentials.pki }}
    type: Directory
{{- end }}
{{- end }}
