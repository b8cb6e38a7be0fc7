#!/usr/bin/env bash
# From raw text to a chat, on any machine and without a download: bash examples/text_to_chat.sh [FOLDER]
#
# A model learns to write from the modules of Python's library, then to answer from their docstrings. Everything is written
# into FOLDER (text_to_chat). If it is interrupted, run it again: it continues where it was. STEPS=3000 makes the first
# training ten times as long, and the second one too, which has half as many steps; name another FOLDER for it.
# STEPS is at least 30.
set -euo pipefail
folder=${1:-text_to_chat}
steps=${STEPS:-300}
training="--config configs/text.yaml --out_dir $folder/runs"
mkdir -p "$folder"

# 1. Tokens: a vocabulary of 2,048 is trained on the text; a twentieth of the modules is held out.
[ -e "$folder/library" ] ||
    python -m data.prepare --source python-library --tokenizer train:2048 --validation hash:0.05 --out "$folder/library"

# 2. Pretraining: predict the next token of the text.
python train.py $training --name pretrained --data.path "$folder/library" --steps "$steps"
python sample.py "$folder/runs/pretrained" --prompt "def read_" --max_new_tokens 60

# 3. Conversations: a question and an answer a line, in the tokens of the pretrained model.
python -m examples.python_questions "$folder/questions.jsonl"
[ -e "$folder/questions" ] ||
    python -m data.prepare --source "$folder/questions.jsonl" --tokenizer "$folder/library/tokenizer" --validation hash:0.05 \
        --out "$folder/questions"

# 4. Fine-tuning: the same recipe from the pretrained weights, with the loss on the answers alone.
python train.py $training --name chat --init_from "$folder/runs/pretrained" --data.path "$folder/questions" \
    --steps "$((steps / 2))" --optimizer.lr 3e-3
python evaluate.py "$folder/runs/chat"

# 5. Chat. Without --prompt, sample.py reads questions from the terminal.
for question in "What is the module json for?" "What does the class Thread of threading do?"; do
    python sample.py "$folder/runs/chat" --chat --prompt "$question" --temperature 0.5
done

# 6. Export, in transformers' format.
[ -e "$folder/export" ] || python export.py "$folder/runs/chat" "$folder/export"
