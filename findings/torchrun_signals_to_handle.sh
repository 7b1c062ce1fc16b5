#!/bin/sh
# torchrun's --signals-to-handle: a signal that asks the ranks to save and go on.
# Versions: torch 2.13.0, numpy 2.1.3, Python 3.11. Two processes.
# Guess: "signals to handle and forward to subprocesses" passes SIGUSR1 on to the ranks, and the run goes on. After
# SIGTERM torchrun ends with 143, as a shell tells a scheduler, or with 0 if all ranks have ended well.
# What happens: each handled signal ends the run. The ranks get it as the request to end, whoever has not ended after
# --shutdown-timeout is killed, and torchrun ends with 1, even if all ranks have ended with 0.
# Seen:
#> USR1, ranks go on: 2 ranks told, 0 reached the end, torchrun's exit code 1
#> TERM, ranks end with 0: 2 ranks told, 2 reached the end, torchrun's exit code 1
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy==2.1.3

cat > "$folder/program.py" <<'EOF'
import signal
import sys
import time

told = []
for number in signal.SIGUSR1, signal.SIGTERM:
    signal.signal(number, lambda number, _: (told.append(number), print("told\n", end="", flush=True)))
print("ready\n", end="", flush=True)
end = time.monotonic() + 20
while time.monotonic() < end and not (told and sys.argv[1] == "end"):
    time.sleep(0.1)
print("reached the end\n", end="", flush=True)
EOF

report() {  # signal, what the ranks do, in words
    log=$folder/$1.log
    "$folder/env/bin/torchrun" --standalone --nproc_per_node=2 --signals-to-handle=SIGTERM,SIGUSR1 \
        --shutdown-timeout=3 "$folder/program.py" "$2" > "$log" 2>> "$folder/errors" &
    torchrun=$!
    until [ "$(grep -c ready "$log")" = 2 ] || ! kill -0 $torchrun; do sleep 0.2; done
    kill -s "$1" $torchrun
    code=0
    wait $torchrun || code=$?
    ended=$(grep -c "reached the end" "$log" || true)
    echo "$1, $3: $(grep -c told "$log") ranks told, $ended reached the end, torchrun's exit code $code" >> "$folder/seen"
}
export OMP_NUM_THREADS=1
report USR1 continue "ranks go on"
report TERM end "ranks end with 0"

sed -n 's/^#> //p' "$0" > "$folder/expected"
diff "$folder/expected" "$folder/seen" || { cat "$folder/errors" >&2; echo "changed: see the lines above" >&2; exit 1; }
echo "as found: each signal that torchrun handles ends the run, with exit code 1"
