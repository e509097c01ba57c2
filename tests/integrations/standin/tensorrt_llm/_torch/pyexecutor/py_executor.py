"""tensorrt_llm/_torch/pyexecutor/{py_executor,model_engine,cuda_graph_runner}.py: requests, steps, captured graphs.

A request's input is given for every position (nothing is sampled), so that two executors can be compared step by step.
"""

import torch

import tensorrt_llm
from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttentionMetadata
from tensorrt_llm._torch.modules.mamba.mamba2_metadata import CUDA_GRAPH_DUMMY_REQUEST_ID


class PyExecutor:
    def __init__(self, model, manager, config, with_kv_lens=True, max_requests=16):
        self.model, self.manager, self.config = model, manager, config
        self.metadata = TrtllmAttentionMetadata(max_requests, manager, with_kv_lens, config.spelling != "global")
        self.done = {}
        self.graphs = {}

    def inputs(self, request_id, start, length):
        """[length, hidden]: the same for the same request and positions."""
        generator = torch.Generator(device="cpu")
        rows = []
        for position in range(start, start + length):
            generator.manual_seed(request_id * 1_000_003 + position)
            rows.append(torch.randn(self.config.hidden_size, generator=generator, device="cpu"))
        return torch.stack(rows).to(tensorrt_llm.DEVICE, self.config.dtype)

    @torch.inference_mode()
    def step(self, contexts=(), decodes=(), padding=0, spec_metadata=None, tokens=1):
        """contexts: (request, prompt tokens) pairs; decodes: requests that get their next token. Returns one output a
        row: that of the row's last token."""
        ids, lens, cached, embeds = self._batch(contexts, decodes, padding, tokens)
        self.metadata.prepare(ids, lens, cached, len(contexts))
        out = self.model(self.metadata, torch.cat(embeds), spec_metadata)
        ends = torch.tensor(lens).cumsum(0) - 1
        return out[ends.to(out.device)][: len(lens) - padding].clone()

    def _batch(self, contexts, decodes, padding, tokens):
        rows = [(request, length) for request, length in contexts] + [(request, tokens) for request in decodes]
        for request, _ in contexts:
            if request not in self.done:
                self.manager.add(request)
                self.done[request] = 0
        cached = [self.done[request] for request, _ in rows] + [7] * padding
        embeds = [self.inputs(request, self.done[request], length) for request, length in rows]
        embeds += [self.inputs(0, 0, 1)] * padding
        for request, length in rows:
            self.done[request] += length
        ids = [request for request, _ in rows] + [CUDA_GRAPH_DUMMY_REQUEST_ID] * padding
        return ids, [length for _, length in rows] + [1] * padding, cached, embeds

    def finish(self, request_id):
        self.manager.free_resources(request_id)
        del self.done[request_id]

    @torch.inference_mode()
    def replay(self, decodes, size):
        """One decode step through a graph for `size` rows, captured on first use behind two warm-up calls."""
        if size not in self.graphs:
            self.graphs[size] = self._capture(size)
        metadata, embeds, graph, out = self.graphs[size]
        ids, lens, cached, rows = self._batch((), decodes, size - len(decodes), 1)
        metadata.prepare(ids, lens, cached, 0)
        embeds.copy_(torch.cat(rows))
        graph.replay()
        return out[: len(decodes)].clone()

    def _capture(self, size):
        metadata = TrtllmAttentionMetadata(size, self.manager, is_cuda_graph=True)
        metadata.prepare([CUDA_GRAPH_DUMMY_REQUEST_ID] * size, [1] * size, [7] * size, 0)
        embeds = self.inputs(0, 0, size)
        for _ in range(2):
            self.model(metadata, embeds)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model(metadata, embeds)
        return metadata, embeds, graph, out
