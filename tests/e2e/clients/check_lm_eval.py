"""lm-evaluation-harness: multiple choice by its local-completions backend. Prints the scores of each question
as JSON. Usage: check_lm_eval.py BASE_URL MODEL TOKENIZER_FOLDER QUESTIONS.jsonl"""

import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

base_url, model, tokenizer, questions = sys.argv[1:]
task = {
    "task": "questions",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": questions}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "gold",
    "doc_to_choice": "{{choices}}",
    "metric_list": [{"metric": "acc"}],
}
arguments = {
    "model": model,
    "base_url": f"{base_url}/completions",
    "tokenizer": tokenizer,
    "tokenized_requests": True,
    "num_concurrent": 2,
    "max_length": 2048,
}
found = lm_eval.simple_evaluate(
    "local-completions", model_args=arguments, tasks=[task], task_manager=TaskManager(include_defaults=False)
)
for sample in found["samples"]["questions"]:
    print(json.dumps({"doc": sample["doc_id"], "scores": [float(answer[0]) for answer in sample["filtered_resps"]]}))
print("ok", found["results"]["questions"]["acc,none"])
