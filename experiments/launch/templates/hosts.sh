hosts=({{ hosts }})
pid={{ pid- }}
if [ -z "${NODE_RANK:-}" ]; then  # called by hand: calls itself on every host, and tells all to stop
    trap 'for rank in "${!hosts[@]}"; do
        ssh -n "${hosts[rank]}" "kill -TERM \$(cat $(printf %q "$pid")$rank)"
    done' TERM INT
    script={{ script }} calls=() code=0
    for rank in "${!hosts[@]}"; do
        variables="NODE_RANK=$rank MASTER_ADDR=${hosts[0]#*@} MASTER_PORT=${MASTER_PORT:-29500}"
        setsid ssh -n "${hosts[rank]}" "$variables exec bash $(printf %q "$script")" &
        calls+=("$!")
    done
    for call in "${calls[@]}"; do
        ended "$call"
        last_code=$?
        [ "$last_code" -eq 0 ] || code=$last_code
    done
    exit "$code"
fi
echo "$$" >"$pid$NODE_RANK"
