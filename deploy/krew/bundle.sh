# shellcheck shell=sh
# shellcheck disable=SC2034,SC2154
# `kubectl postern bundle`: read by kubectl-postern, into which `cargo xtask release` puts it.

# Pods with this name, whatever their state, as POD:RESTARTS:CONTAINER:PROGRAM. One that has not started has no count of restarts.
all_pods() {
  name=$1
  kube get pods --selector="app.kubernetes.io/name=$name" ${2:+"$2"} \
    --output='jsonpath={range .items[*]}{.metadata.name}{" "}{.status.containerStatuses[0].restartCount}{"\n"}{end}' |
    awk -v "container=$name" '{ print $1 ":" ($2 + 0) ":" container ":" (container ~ /agent/ ? container : "tunnel-server") }'
}

# Finds the first server that takes secrets out of texts.
redacts() {
  [ "$code" -ne 0 ] || redactor=${redactor:-$1}
}

# A file without secrets; nothing of it if no server can take them out.
redact() {
  if [ -n "$redactor" ]; then
    input=$1
    limited exec "$redactor" --stdin --container=tunnel-server -- /tunnel-server redact || :
    input=
  else
    echo "(left out: no server answers that could take the secrets out)"
  fi
}

# POD:RESTARTS:CONTAINER:PROGRAM: that pod's bundle, as the pod makes it: what a node sends is not unpacked here, and bounded. Or why
# there is none.
gather() {
  IFS=: read -r pod restarts container program <<END
$1
END
  ulimit -f 131072 2>/dev/null || :
  to=$folder/$pod
  log=$work/$turn.log
  echo "== $pod" >&5
  code=0
  since=$(date +%s)
  limited logs "$pod" --container="$container" --timestamps --tail=20000 >"$log" 2>"$to.txt" || code=$?
  # A pod that has not answered, or whose node could not be dialled, is not asked again.
  hangs=
  case $code in
    0) ;;
    143) hangs=1 ;;
    *) [ $(($(date +%s) - since)) -lt 10 ] || hangs=1 ;;
  esac
  input=$log
  if [ -z "$hangs" ] && limited exec "$pod" --stdin --container="$container" -- "/$program" bundle --file=- --log=- \
    >"$work/$turn.tar.gz" 2>"$to.txt"; then
    mv "$work/$turn.tar.gz" "$to.tar.gz"
    rm -f "$to.txt"
  else
    echo "kubectl postern: $pod gives no bundle: $(head -n 1 "$to.txt")" >&5
    echo "$pod" >>"$work/failed"
    echo >>"$to.txt"
    redact "$log" >>"$to.txt"
  fi
  input=
  if [ "$restarts" -gt 0 ] && [ -z "$hangs" ]; then
    limited logs "$pod" --container="$container" --timestamps --tail=20000 --previous >"$log" 2>&1 || :
    redact "$log" >"$to-previous.txt"
  fi
  rm -f "$log" "$work/$turn.tar.gz"
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
  folder=$work/$name
  mkdir "$folder"
  redactor=
  list=$(pods tunnel-server)
  at_once in_server redacts redact
  cluster >"$work/cluster"
  redact "$work/cluster" >"$folder/cluster.txt"
  list=$(
    all_pods tunnel-server
    all_pods tunnel-redirector
    [ -n "$nodes" ] || all_pods tunnel-agent
    for node in $nodes; do
      all_pods tunnel-agent --field-selector="spec.nodeName=$node"
    done
  )
  [ -n "$list" ] || {
    echo "kubectl postern: there are no pods of Postern in namespace $namespace" >&2
    exit 1
  }
  agents=$(printf '%s\n' "$list" | grep -c ':tunnel-agent$') || :
  [ -n "$nodes" ] || [ "$agents" -le 200 ] || fail "bundle: there are $agents agents; name the nodes"
  # The pods' names come as they are asked.
  at_once gather : 5>&2
  tar -C "$work" -czf - "$name" >"$work/archive"
  (set -C && cat "$work/archive" >"$file")
  echo "$file: $(printf '%s\n' "$list" | wc -l | tr -d ' ') pods"
  [ ! -e "$work/failed" ] || {
    echo "kubectl postern: there is no bundle of $(wc -l <"$work/failed" | tr -d ' ') of them; NAME.txt has the reason and the log" >&2
    exit 1
  }
}
