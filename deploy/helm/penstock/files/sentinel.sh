#!/bin/sh
# One Sentinel of a pool: sentinel.sh start | ready | alive.
#
# What Sentinels know (who is the primary, whom they voted for) is in their configuration, which outlives a container but
# not a pod. So a Sentinel starts without a primary, and then:
#
# 1. It takes over what another Sentinel names.
# 2. Only where all others answer that they know none either does the first of the list choose: a server that is a primary
#    already; else a replica that had a complete copy and lost its primary lately; else, once all servers answer (or
#    after PATIENCE_S, if one of them has data), that with the freshest data; else, at the first start of all, the first
#    of the list. One chooses, so no two can choose differently.
# 3. Where all others have agreed on another primary than this one for a while, it follows them.
#
# Its id comes from its address, so that a Sentinel that comes back is not counted as one more.
#
# Environment: SELF, SENTINELS, SERVERS (HOST:PORT, separated by blanks), PRIMARY_NAME, QUORUM, DOWN_AFTER_MS,
# FAILOVER_TIMEOUT_MS, PATIENCE_S, RUN_DIR, PASSWORD_DIR (file `admin`; none: no password), and what connection.sh reads.
set -eu
# shellcheck source=connection.sh
. "$(dirname "$0")/connection.sh"

PROGRAM=${VALKEY_SERVER:-valkey-server}
FOLLOW_AFTER=15 # looks
JOINED_PRIORITY=100 # of a server that was a primary, or had a complete copy of one, since it started (valkey.sh)

log() { echo "sentinel.sh: $*" >&2; }

ask_server() {
  (
    if [ -n "${PASSWORD_DIR:-}" ]; then
      REDISCLI_AUTH=$(cat "$PASSWORD_DIR/admin")
      VALKEYCLI_AUTH=$REDISCLI_AUTH
      export REDISCLI_AUTH VALKEYCLI_AUTH
    fi
    ask "$@"
  )
}

# named_by HOST:PORT: the primary that a Sentinel names, or nothing.
named_by() {
  answer=$(ask "$1" SENTINEL GET-MASTER-ADDR-BY-NAME "$PRIMARY_NAME" | tr '\n' ':')
  answer=${answer%:}
  case $answer in
    *[!A-Za-z0-9.:-]* | "" | :) ;;
    *) echo "$answer" ;;
  esac
}

# primary_of HOST:PORT: the primary that a Sentinel knows, `none`, or nothing if the Sentinel does not answer. One that is
# down and of which it knows no replica is none: nobody could be promoted. So it is where a primary dies before Sentinels
# have asked it for its replicas, which they do every ten seconds.
primary_of() {
  if [ "$(ask "$1" PING)" != PONG ]; then return; fi
  known=$(named_by "$1")
  state=$(ask "$1" SENTINEL MASTER "$PRIMARY_NAME" | paste -d ' ' - -)
  case "$(printf '%s\n' "$state" | grep '^flags ')/$(printf '%s\n' "$state" | grep '^num-slaves ')" in
    *o_down*/"num-slaves 0") known="" ;;
  esac
  echo "${known:-none}"
}

# Commands come by standard input: an argument could be read by everybody in the container.
monitor() {
  ask "$SELF" SENTINEL REMOVE "$PRIMARY_NAME" >/dev/null
  {
    echo "SENTINEL MONITOR $PRIMARY_NAME ${1%:*} ${1##*:} $QUORUM"
    if [ -n "${PASSWORD_DIR:-}" ]; then echo "SENTINEL SET $PRIMARY_NAME auth-pass $(cat "$PASSWORD_DIR/admin")"; fi
    echo "SENTINEL SET $PRIMARY_NAME down-after-milliseconds $DOWN_AFTER_MS failover-timeout $FAILOVER_TIMEOUT_MS parallel-syncs 1"
  } | ask "$SELF" >/dev/null
}

# seconds_alone TEXT: for how long a replica has had no link to its primary.
seconds_alone() {
  seconds=$(field master_link_down_since_seconds "$1")
  echo "${seconds:-0}"
}

# The server to name where nobody knows a primary; nothing as long as that cannot be said.
choose() {
  is_missing=0
  best=""
  best_priority=""
  primary=""
  most_replicas=-1
  copy=""
  for server in $SERVERS; do
    theirs=$(ask_server "$server" INFO replication)
    case $(field role "$theirs") in
      master)
        if [ "$(field connected_slaves "$theirs")" -gt "$most_replicas" ]; then
          primary=$server
          most_replicas=$(field connected_slaves "$theirs")
        fi
        ;;
      slave)
        priority=$(field slave_priority "$theirs")
        if [ "$priority" = "$JOINED_PRIORITY" ] && [ "$(seconds_alone "$theirs")" -le "$PATIENCE_S" ]; then copy=$server; fi
        if [ "$priority" != 0 ] && { [ -z "$best" ] || [ "$priority" -lt "$best_priority" ]; }; then
          best=$server
          best_priority=$priority
        fi
        ;;
      *) is_missing=1 ;;
    esac
  done
  if [ -n "$primary" ]; then
    echo "$primary"
  elif [ -n "$copy" ]; then
    echo "$copy"
  elif [ "$is_missing" = 0 ]; then
    echo "${best:-${SERVERS%% *}}"
  elif [ "$waited_s" -ge "$PATIENCE_S" ]; then
    echo "$best"
  fi
}

step() {
  mine=$(primary_of "$SELF")
  if [ -z "$mine" ]; then return; fi
  answers=""
  is_silent=0
  for sentinel in $SENTINELS; do
    if [ "$sentinel" = "$SELF" ]; then continue; fi
    answer=$(primary_of "$sentinel")
    if [ -z "$answer" ]; then is_silent=1; else answers="$answers $answer"; fi
  done
  named=""
  is_agreed=1
  for answer in $answers; do
    if [ "$answer" != none ] && [ -z "$named" ]; then named=$answer; fi
    if [ "$answer" = none ] || [ "$answer" != "$named" ]; then is_agreed=0; fi
  done
  if [ "$mine" != none ]; then
    if [ "$is_silent" = 0 ] && [ "$is_agreed" = 1 ] && [ -n "$named" ] && [ "$named" != "$mine" ]; then
      others_agree=$((others_agree + 1))
    else
      others_agree=0
    fi
    if [ "$others_agree" -ge "$FOLLOW_AFTER" ]; then
      log "all others name $named: following them"
      monitor "$named"
      others_agree=0
    fi
    return
  fi
  if [ -z "$named" ] && [ "$is_silent" = 0 ] && [ "$SELF" = "${SENTINELS%% *}" ]; then
    waited_s=$((waited_s + 1))
    named=$(choose)
    if [ -n "$named" ]; then log "nobody knows a primary: $named it is"; fi
  fi
  if [ -n "$named" ] && [ "$named" != "$(named_by "$SELF")" ]; then
    monitor "$named"
    waited_s=0
  fi
}

supervise() {
  waited_s=0
  others_agree=0
  while :; do
    step || true
    sleep 1
  done
}

start() {
  umask 077
  if [ ! -s "$RUN_DIR/sentinel.conf" ]; then
    {
      listen
      cat <<EOF
bind * -::*
protected-mode no
dir $RUN_DIR
logfile ""
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip ${SELF%:*}
sentinel announce-port ${SELF##*:}
sentinel myid $(printf '%s' "$SELF" | sha1sum | cut -d ' ' -f 1)
EOF
    } >"$RUN_DIR/sentinel.conf"
  fi
  "$PROGRAM" "$RUN_DIR/sentinel.conf" --sentinel &
  server=$!
  supervise &
  supervisor=$!
  trap 'trap "" TERM INT; kill -TERM "$server" 2>/dev/null || true' TERM INT
  status=0
  while kill -0 "$server" 2>/dev/null; do
    status=0
    wait "$server" || status=$?
  done
  kill "$supervisor" 2>/dev/null || true
  exit "$status"
}

case ${1:-start} in
  start) start ;;
  alive) [ "$(ask "$SELF" PING)" = PONG ] ;;
  ready)
    mine=$(primary_of "$SELF")
    [ -n "$mine" ] && [ "$mine" != none ]
    ;;
  *)
    log "unknown command $1: start, ready or alive"
    exit 2
    ;;
esac
