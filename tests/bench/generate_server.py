"""transformers' own `generate` behind the least of a server: one request at a time, every prompt read from its start.

`python -m tests.bench.generate_server FOLDER PORT DTYPE`. A baseline, and nothing to chat with.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, TextIteratorStreamer


def app(folder: str, dtype: str) -> FastAPI:
    """The routes that the workloads use."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    lock = threading.Lock()
    api = FastAPI()

    @api.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "generate"}]}

    @api.post("/v1/chat/completions")
    async def complete(request: Request) -> StreamingResponse:
        return StreamingResponse(written(await request.json()), media_type="text/event-stream")

    def written(body: dict[str, Any]) -> Iterator[str]:
        prompt = tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        length = prompt["input_ids"].shape[1]
        with lock:
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            found: list[torch.Tensor] = []
            options = {"max_new_tokens": body["max_tokens"], "do_sample": False, "past_key_values": DynamicCache()}
            work = threading.Thread(
                target=lambda: found.append(model.generate(**prompt, **options, streamer=streamer)), daemon=True
            )
            work.start()
            for text in streamer:
                if text:
                    yield _event({"choices": [{"index": 0, "delta": {"content": text}}]})
            work.join()
        count = found[0].shape[1] - length if found else 0
        yield _event({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count}})
        yield "data: [DONE]\n\n"

    return api


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


if __name__ == "__main__":
    uvicorn.run(app(sys.argv[1], sys.argv[3]), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
