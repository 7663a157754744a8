"""Write ``golden/greedy.json``: what ``transformers.generate`` answers, in fp32, greedily.

    python tests/system/make_golden.py

Forty prompts around the block boundaries (n·B-1, n·B, n·B+1 for B = 16), up to 1,025 tokens.
With each output token goes the margin between the best and the second-best logit: a margin
under 1e-4 is the only admissible reason for another implementation to differ.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.known_models import KNOWN_MODELS, known_model_file

HERE = Path(__file__).parent
OUTPUT_TOKENS = 24
LENGTHS = [
    *(n * 16 + d for n in (1, 2, 3, 4, 6, 8, 12) for d in (-1, 0, 1)),
    *(n * 16 + d for n in (16, 20, 24, 32) for d in (-1, 0, 1)),
    *(1023, 1024, 1025),
    *(5, 40, 75, 300),
]
PASSAGES = [
    "The harbour was quiet before dawn, and the pilot counted the lamps along the mole.",
    "Write a short note to a colleague explaining why the build failed last night.",
    "In 1687 the Principia described how bodies attract one another across empty space.",
    "def merge(left, right):\n    result = []\n    while left and right:\n",
    "Mix the flour with the salt, add warm water, and knead the dough for ten minutes.",
    "Question: What is the capital of France, and which river runs through it? Answer:",
    "A memory allocator keeps free blocks in lists by size and splits them when needed.",
    "She opened the letter slowly, because the handwriting was her brother's.",
    "The committee met on Tuesday to discuss the budget, the bridge and the new school.",
    "Once upon a time there was a fox who wanted to learn how to read the stars.",
]


def prompts(tokenizer: object) -> list[list[int]]:
    """Return prompts of exactly ``LENGTHS`` tokens, no two with the same beginning."""
    out = []
    for i, length in enumerate(LENGTHS):
        rotated = PASSAGES[i % 10 :] + PASSAGES[: i % 10]
        text = f"{i + 1}. " + " ".join(rotated * 8)
        ids = tokenizer(text)["input_ids"]  # type: ignore[operator]
        assert len(ids) >= length, (len(ids), length)
        out.append(ids[:length])
    return out


def main() -> None:
    """Compute and write the file."""
    path = known_model_file(KNOWN_MODELS["smollm2-135m-instruct"])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    cases = []
    for ids in prompts(tokenizer):
        out = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [torch.topk(row[0], 2).values for row in out.logits]
        cases.append(
            {
                "prompt_ids": ids,
                "output_ids": out.sequences[0, len(ids) :].tolist(),
                "margins": [round(float(b[0] - b[1]), 6) for b in best],
            }
        )
        print(f"{len(cases)}/{len(LENGTHS)} prompt of {len(ids)} tokens", flush=True)
    target = HERE / "golden" / "greedy.json"
    target.write_text(json.dumps({"max_tokens": OUTPUT_TOKENS, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
