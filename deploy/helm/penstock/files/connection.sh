#!/bin/sh
# How servers and Sentinels are reached; read by valkey.sh and sentinel.sh.
#
# Environment: SELF, TLS_DIR (files `tls.crt`, `tls.key` and `ca.crt`; none: no TLS) and TLS_AUTH_CLIENTS (yes: who connects
# must show a certificate of that authority).

CLI=${VALKEY_CLI:-valkey-cli}

# ask HOST:PORT COMMAND…: its reply. Passwords come from the environment, never from arguments.
ask() {
  address=$1
  shift
  if [ -n "${TLS_DIR:-}" ]; then
    set -- --tls --cacert "$TLS_DIR/ca.crt" --cert "$TLS_DIR/tls.crt" --key "$TLS_DIR/tls.key" "$@"
  fi
  timeout 3 "$CLI" -h "${address%:*}" -p "${address##*:}" "$@" 2>/dev/null | tr -d '\r'
}

# field NAME TEXT: its value in a reply to INFO.
field() { printf '%s\n' "$2" | sed -n "s/^$1://p" | head -n 1; }

# listen: the directives by which a server or Sentinel is reached, and reaches others.
listen() {
  if [ -z "${TLS_DIR:-}" ]; then
    echo "port ${SELF##*:}"
    return
  fi
  cat <<EOF
port 0
tls-port ${SELF##*:}
tls-cert-file $TLS_DIR/tls.crt
tls-key-file $TLS_DIR/tls.key
tls-ca-cert-file $TLS_DIR/ca.crt
tls-auth-clients ${TLS_AUTH_CLIENTS:-no}
tls-replication yes
EOF
}
