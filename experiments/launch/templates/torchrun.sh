launcher=
trap 'stopped=1; kill -TERM "$launcher" 2>/dev/null' TERM INT

# One attempt on every rank, in a session of its own so that Ctrl-C reaches this shell alone.
attempt() {
    if [ "$stopped" -eq 1 ]; then return 7; fi
    setsid {{ launcher }} -m "$@" &
    launcher=$!
    ended "$launcher"
}

while :; do
    attempt {{ train }}
    leave_if_over "$?"
    if [ "$stopped" -eq 1 ]; then exit 7; fi
    before=$(checkpoints)
done
