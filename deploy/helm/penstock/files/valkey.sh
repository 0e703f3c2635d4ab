#!/bin/sh
# One Valkey server of a pool: valkey.sh start | ready | alive.
#
# Two things must never happen: that two servers both go on as the primary, and that an empty disk becomes the primary
# while a replica has data, for the replica would then copy the emptiness. So no server decides by itself what it is:
#
# 1. Every server starts as a replica of nobody: it answers INFO, but no data (`replica-serve-stale-data no`), takes no
#    writes, and gives no replica a copy, as it has no link to a primary itself (MASTERDOWN).
# 2. It becomes what a majority of the Sentinels has named in three looks in a row, a second apart, while none of them was
#    promoting anybody and its own role did not change: the primary, or a replica of the primary. So a former primary
#    comes back as a replica of whoever was promoted, also one that was only suspended. (Whom a Sentinel has just promoted
#    is named by it first, and by the others a moment later: to follow those at once would undo the promotion.)
# 3. The disk knows whether it holds the pool's data: the file `holds-data` is written by a primary and by a replica
#    whose copy is complete, and goes with the disk. Without it the replica's priority is 0, which Sentinels never
#    promote, and a server that Sentinels still name stays away, until they count it as down and promote a replica that
#    has data. Only where every other server answers and is empty, too (the first start), does an empty server become the
#    primary.
# 4. While a server waits, its priority tells how old its data are (the lower, the fresher), for the case that all
#    Sentinels have lost what they knew, too: sentinel.sh names the freshest then.
#
# Environment: SELF and PEERS (HOST:PORT; PEERS are all servers, separated by blanks), SENTINELS (as well; none: this is
# the only server, and always the primary), PRIMARY_NAME, DATA_DIR, RUN_DIR (in memory), SETTINGS_FILE (further
# directives), PASSWORD_DIR (files `admin`, `services` and `scaler`; none: no passwords), POOL, and what connection.sh reads.
set -eu
# shellcheck source=connection.sh
. "$(dirname "$0")/connection.sh"

PROGRAM=${VALKEY_SERVER:-valkey-server}
JOINED_PRIORITY=100
STEADY_LOOKS=3
OLDEST_PRIORITY=2147483647
EPOCH_S=1577836800 # 2020: what is left of seconds fits into a priority
MARKER=$DATA_DIR/holds-data

log() { echo "valkey.sh: $*" >&2; }

ask_sentinel() {
  (
    unset REDISCLI_AUTH VALKEYCLI_AUTH
    ask "$@"
  )
}

log_in() {
  if [ -n "${PASSWORD_DIR:-}" ]; then
    REDISCLI_AUTH=$(cat "$PASSWORD_DIR/admin")
    VALKEYCLI_AUTH=$REDISCLI_AUTH
    export REDISCLI_AUTH VALKEYCLI_AUTH
  fi
}

# replication HOST:PORT: its INFO replication and whether it loads; nothing if it does not answer.
replication() {
  ask "$1" INFO replication
  ask "$1" INFO persistence | grep '^loading:' || true
}

# The address that more than half of the Sentinels name; nothing if there is none.
named_primary() {
  count=0
  answers=""
  for sentinel in $SENTINELS; do
    count=$((count + 1))
    answer=$(ask_sentinel "$sentinel" SENTINEL GET-MASTER-ADDR-BY-NAME "$PRIMARY_NAME" | tr '\n' ':')
    answer=${answer%:}
    case $answer in
      *[!A-Za-z0-9.:-]* | "" | :) ;;
      *) answers="$answers $answer" ;;
    esac
  done
  for answer in $answers; do
    votes=0
    for other in $answers; do
      if [ "$other" = "$answer" ]; then votes=$((votes + 1)); fi
    done
    if [ $((votes * 2)) -gt "$count" ]; then
      echo "$answer"
      return
    fi
  done
}

# Whether a Sentinel is just promoting another server.
failover_runs() {
  for sentinel in $SENTINELS; do
    if ask_sentinel "$sentinel" SENTINEL MASTER "$PRIMARY_NAME" | grep -q failover_in_progress; then return 0; fi
  done
  return 1
}

holds_data() { [ -f "$MARKER" ] && [ -d "$DATA_DIR/appendonlydir" ]; }

# A primary is ahead of its copies, so it counts as the fresher one where both were up to date within seconds.
mark() {
  now=$(date +%s)
  if [ "$role" != "$marked_role" ]; then marked_s=0; fi
  if [ $((now - marked_s)) -ge 5 ]; then
    ahead_s=0
    if [ "$role" = master ]; then ahead_s=10; fi
    echo "$((now + ahead_s))" >"$MARKER.new"
    mv "$MARKER.new" "$MARKER"
    marked_s=$now
    marked_role=$role
  fi
  if [ "$priority" != "$JOINED_PRIORITY" ]; then
    ask "$SELF" CONFIG SET replica-priority "$JOINED_PRIORITY" >/dev/null && priority=$JOINED_PRIORITY
  fi
}

# Whether every other server answers and says that it has no data.
all_others_are_empty() {
  for peer in $PEERS; do
    if [ "$peer" = "$SELF" ]; then continue; fi
    theirs=$(replication "$peer")
    if [ "$(field role "$theirs")" != slave ] || [ "$(field slave_priority "$theirs")" != 0 ]; then return 1; fi
  done
}

# One look at what this server is and what the Sentinels say that it is to be.
step() {
  mine=$(replication "$SELF")
  role=$(field role "$mine")
  if [ -z "$role" ] || [ "$(field loading "$mine")" = 1 ]; then return; fi
  # Whoever was promoted between two looks waits until the other Sentinels have heard of it.
  if [ "$role" != "$last_role" ]; then
    last_role=$role
    looks=0
  fi
  if [ "$role" = master ]; then
    mark
  elif [ "$(field master_link_status "$mine")" = up ] && [ "$(field master_sync_in_progress "$mine")" = 0 ]; then
    mark
    # Until it is named, a primary refuses PSYNC with MASTERDOWN, which replicas take for the answer of a server that has
    # no PSYNC. If it is named just then, they copy by SYNC: they have no id of its history, acknowledge nothing by
    # themselves, and copy everything again after each lost link.
    if [ -z "$(field master_replid "$mine")" ]; then
      log "copied by SYNC: linking again, by PSYNC"
      ask "$SELF" CLIENT KILL TYPE master >/dev/null
    fi
  fi
  named=$(named_primary)
  if [ -z "$named" ] || [ "$named" != "$last_named" ] || failover_runs; then
    last_named=$named
    looks=0
    return
  fi
  looks=$((looks + 1))
  if [ "$looks" -lt "$STEADY_LOOKS" ]; then return; fi
  if [ "$named" != "$SELF" ]; then
    if [ "$role" = master ] || [ "$(field master_host "$mine"):$(field master_port "$mine")" != "$named" ]; then
      log "a replica of $named from now on"
      ask "$SELF" REPLICAOF "${named%:*}" "${named##*:}" >/dev/null
    fi
  elif [ "$role" != master ]; then
    if holds_data || all_others_are_empty; then
      log "the primary from now on"
      ask "$SELF" REPLICAOF NO ONE >/dev/null
    else
      touch "$RUN_DIR/withdrawn"
      kill -TERM "$server"
    fi
  fi
}

# A server without data that is named as the primary stays away, so that Sentinels count it as down and promote another.
stay_away() {
  if holds_data; then return; fi
  while [ "$(named_primary)" = "$SELF" ] && ! all_others_are_empty; do
    log "named as the primary, but the disk is empty: staying away until a server that has data is named"
    sleep 1
  done
}

supervise() {
  marked_s=0
  marked_role=""
  last_named=""
  last_role=""
  looks=0
  while :; do
    step || true
    sleep 1
  done
}

# The address of another server that some Sentinel names as the primary.
other_named() {
  for sentinel in $SENTINELS; do
    answer=$(ask_sentinel "$sentinel" SENTINEL GET-MASTER-ADDR-BY-NAME "$PRIMARY_NAME" | tr '\n' ':')
    answer=${answer%:}
    case $answer in
      *[!A-Za-z0-9.:-]* | "" | : | "$SELF") ;;
      *)
        echo "$answer"
        return
        ;;
    esac
  done
}

# Before it ends, a primary lets a replica take over, so that an upgrade is not an outage. A Sentinel knows no good replica
# for up to ten seconds after one has completed its copy. Whoever is promoted lacks nothing, as nobody writes meanwhile.
hand_over() {
  tries=0
  while [ $tries -lt 40 ]; do
    tries=$((tries + 1))
    mine=$(replication "$SELF")
    case $(field role "$mine") in
      slave) return ;;
      master) ;;
      *) # no answer in time: the machine is busy
        sleep 0.3
        continue
        ;;
    esac
    # A Sentinel that has promoted another tells this server so after ten seconds only, and would promote it again if it
    # was asked once more.
    other=$(other_named)
    if [ -n "$other" ]; then
      log "handed over to $other"
      ask "$SELF" REPLICAOF "${other%:*}" "${other##*:}" >/dev/null
      return
    fi
    if ! failover_runs; then
      if ! printf '%s\n' "$mine" | grep -q 'state=online'; then
        log "ends as the primary: no replica has a complete copy"
        return
      fi
      ask "$SELF" CLIENT PAUSE 3000 WRITE >/dev/null
      is_begun=0
      for sentinel in $SENTINELS; do
        case $(ask_sentinel "$sentinel" SENTINEL FAILOVER "$PRIMARY_NAME") in
          OK | INPROG*)
            is_begun=1
            break
            ;;
        esac
      done
      if [ "$is_begun" = 0 ]; then ask "$SELF" CLIENT UNPAUSE >/dev/null; fi
    fi
    sleep 0.3
  done
  log "ends as the primary: no Sentinel has promoted a replica"
}

# acl_user NAME PASSWORD_FILE RIGHTS…: a line of the ACL file; it has the password's digest.
acl_user() {
  digest=$(tr -d '\n' <"$2" | sha256sum | cut -d ' ' -f 1)
  name=$1
  shift 2
  echo "user $name on #$digest $*"
}

write_acl() {
  acl_user default "$PASSWORD_DIR/admin" '~* &* +@all'
  acl_user penstock "$PASSWORD_DIR/services" "resetkeys resetchannels -@all ~{$POOL}:* $(cat "$RIGHTS_FILE")"
  acl_user scaler "$PASSWORD_DIR/scaler" "resetkeys resetchannels -@all ~{$POOL}:prompts +auth +select +ping +hello +info +xlen +xpending +xinfo|groups"
}

write_settings() {
  listen
  cat <<EOF
bind * -::*
protected-mode no
dir $DATA_DIR
logfile ""
save ""
appendonly yes
appendfsync everysec
auto-aof-rewrite-min-size 4gb
no-appendfsync-on-rewrite yes
maxmemory-policy noeviction
client-output-buffer-limit replica 1gb 512mb 120
replica-serve-stale-data no
replica-read-only yes
repl-diskless-load disabled
repl-diskless-sync-delay 0
EOF
  if [ -f "${SETTINGS_FILE:-}" ]; then cat "$SETTINGS_FILE"; fi
  if [ -n "${PASSWORD_DIR:-}" ]; then
    echo "aclfile $RUN_DIR/users.acl"
    echo "masterauth \"$(cat "$PASSWORD_DIR/admin")\""
  fi
  if [ -n "$SENTINELS" ]; then
    echo "replica-announce-ip ${SELF%:*}"
    echo "replica-announce-port ${SELF##*:}"
    echo "replica-priority $priority"
    echo "replicaof 127.0.0.1 1"
  fi
}

start() {
  umask 077
  trap 'exit 0' TERM INT
  stay_away
  priority=0
  if holds_data; then priority=$((OLDEST_PRIORITY - $(cat "$MARKER") + EPOCH_S)); fi
  if [ -n "${PASSWORD_DIR:-}" ]; then write_acl >"$RUN_DIR/users.acl"; fi
  write_settings >"$RUN_DIR/valkey.conf"
  "$PROGRAM" "$RUN_DIR/valkey.conf" &
  server=$!
  supervisor=""
  if [ -n "$SENTINELS" ]; then
    supervise &
    supervisor=$!
  else
    date +%s >"$MARKER" # the only server has what data there are, also once it gets replicas
  fi
  trap 'trap "" TERM INT; hand_over || true; kill -TERM "$server" 2>/dev/null || true' TERM INT
  status=0
  while kill -0 "$server" 2>/dev/null; do
    status=0
    wait "$server" || status=$?
  done
  if [ -n "$supervisor" ]; then kill "$supervisor" 2>/dev/null || true; fi
  if [ -f "$RUN_DIR/withdrawn" ]; then
    rm "$RUN_DIR/withdrawn"
    start
  fi
  exit "$status"
}

log_in
case ${1:-start} in
  start) start ;;
  alive) ask "$SELF" PING | grep -Eq 'PONG|LOADING|MASTERDOWN' ;;
  ready)
    mine=$(replication "$SELF")
    [ "$(field role "$mine")" = master ] || [ "$(field master_link_status "$mine")" = up ]
    ;;
  *)
    log "unknown command $1: start, ready or alive"
    exit 2
    ;;
esac
