#!/bin/sh
# The live panel as a real terminal shows it: trains the demo in tmux and writes what is on the screen to docs/.
#   scripts/capture_panel.sh [SECONDS]     wait that long before the picture is taken (default 45)
# panel.txt holds plain characters; panel.svg the same screen in colour, drawn by rich.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
seconds=${1:-45}
run=$(mktemp -d)
name="penstock-panel-$$"
mkdir -p docs
tmux new-session -d -s "$name" -x 96 -y 30 \
    "$python -m penstock train demo --homes gpu=0.4,stream=0.3,host=0.3 --validation 0.1 --eval-every 10 --save-every 10 --output-dir $run/demo; sleep 60"
sleep "$seconds"
tmux capture-pane -p -t "$name" >docs/panel.txt
tmux capture-pane -e -p -t "$name" >"$run/panel.ansi"
tmux kill-session -t "$name"
"$python" - "$run/panel.ansi" docs/panel.svg <<'PYTHON'
import sys
from rich.console import Console
from rich.text import Text

console = Console(record=True, width=96, file=open("/dev/null", "w"))
console.print(Text.from_ansi(open(sys.argv[1], encoding="utf-8").read().rstrip()))
console.save_svg(sys.argv[2], title="penstock train demo")
PYTHON
rm -rf "$run" 2> /dev/null || { sleep 10; rm -rf "$run"; } # the run saves first, having lost its terminal
cat docs/panel.txt
