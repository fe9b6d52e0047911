# shellcheck shell=sh
# shellcheck disable=SC2154
# `kubectl postern bundle`: read by kubectl-postern, into which `cargo xtask release` puts it.

# Name and restarts of pods, whatever their state, one a line.
all_pods() {
  program=$1
  shift
  kube get pods --selector="app.kubernetes.io/name=$program" "$@" --output='jsonpath={range .items[*]}{.metadata.name}{" "}{.status.containerStatuses[0].restartCount}{"\n"}{end}'
}

# The first server that takes secrets out of texts.
redactor() {
  for pod in $(pods tunnel-server); do
    if kube exec "$pod" --container=tunnel-server -- /tunnel-server redact </dev/null 2>/dev/null; then
      echo "$pod"
      return
    fi
  done
}

# Standard input without secrets; nothing if no server can take them out.
redact() {
  if [ -n "$redactor" ]; then
    kube exec --stdin "$redactor" --container=tunnel-server -- /tunnel-server redact
  else
    cat >/dev/null
    echo "(left out: no server answers that could take the secrets out)"
  fi
}

# One pod's bundle, as the pod makes it: what a node sends is not unpacked here, and bounded. Or why there is none.
gather() {
  to=$folder/$1
  echo "== $1" >&2
  if ! { kube logs "$1" --container="$2" --timestamps --tail=20000 2>/dev/null || :; } |
    (ulimit -f 131072 && kube exec --stdin "$1" --container="$2" -- "/$3" bundle --file=- --log=-) >"$to.tar.gz" 2>"$to.txt"; then
    rm -f "$to.tar.gz"
    { echo; kube logs "$1" --container="$2" --timestamps --tail=20000 2>&1 || :; } | redact >>"$to.txt"
    echo "kubectl postern: $1 gives no bundle: $(head -n 1 "$to.txt")" >&2
    echo "$1" >>"$work/failed"
  else
    rm -f "$to.txt"
  fi
  [ "$4" -eq 0 ] ||
    { kube logs "$1" --container="$2" --timestamps --tail=20000 --previous 2>&1 || :; } | redact >"$to-previous.txt"
}

# What kubectl shows of the installation.
cluster() {
  for what in pods,daemonsets,services,endpointslices,leases,configmaps events; do
    echo "==> kubectl --namespace=$namespace get $what"
    kube get "$what" --output=wide 2>&1 || :
  done
  for what in nodes csr; do
    echo "==> kubectl get $what"
    kube get "$what" --output=wide 2>&1 || :
  done
  echo "==> kubectl version"
  kube version 2>&1 || :
}

bundle() {
  file=
  nodes=
  for word in "$@"; do
    case $word in
      --file=*) file=${word#*=} ;;
      -*) fail "bundle: $word is not known" ;;
      *)
        need_node "$word"
        nodes="$nodes $word"
        ;;
    esac
  done
  name=postern-bundle-$(date -u +%Y%m%dT%H%M%SZ)
  file=${file:-$name.tar.gz}
  [ ! -e "$file" ] || fail "bundle: $file is there already"
  umask 077
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM
  folder=$work/$name
  mkdir "$folder"
  redactor=$(redactor)
  cluster | redact >"$folder/cluster.txt"
  {
    all_pods tunnel-server | sed 's|$| tunnel-server tunnel-server|'
    all_pods tunnel-redirector | sed 's|$| tunnel-redirector tunnel-server|'
    if [ -n "$nodes" ]; then
      for node in $nodes; do
        all_pods tunnel-agent --field-selector="spec.nodeName=$node"
      done
    else
      all_pods tunnel-agent
    fi | sed 's|$| tunnel-agent tunnel-agent|'
  } >"$work/pods"
  [ -s "$work/pods" ] || {
    echo "kubectl postern: there are no pods of Postern in namespace $namespace" >&2
    exit 1
  }
  agents=$(grep -c ' tunnel-agent$' "$work/pods") || :
  [ -n "$nodes" ] || [ "$agents" -le 200 ] || fail "bundle: there are $agents agents; name the nodes"
  count=0
  # A pod that has not started has no count of restarts.
  while read -r pod restarts container program; do
    [ -n "$program" ] || {
      program=$container
      container=$restarts
      restarts=0
    }
    gather "$pod" "$container" "$program" "$restarts" </dev/null &
    count=$((count + 1))
    [ $((count % 8)) -ne 0 ] || wait
  done <"$work/pods"
  wait
  tar -C "$work" -czf - "$name" >"$work/archive"
  (set -C && cat "$work/archive" >"$file")
  echo "$file: $count pods"
  [ ! -e "$work/failed" ] || {
    echo "kubectl postern: there is no bundle of $(wc -l <"$work/failed" | tr -d ' ') of them; NAME.txt has the reason and the log" >&2
    exit 1
  }
}
