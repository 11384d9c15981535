"""Draft a chain from one distribution, the target's at the end of the last step."""

import torch

from lantern_bench.decoding.drafting.draft_method import DraftMethod
from lantern_bench.decoding.sampling import draw_without_replacement, most_probable
from lantern_bench.decoding.tree import chain


class Echo(DraftMethod):
    """A chain of `length` nodes; its state is one distribution per image."""

    reads_last_step = True

    def __init__(self, decoding, target, batch):
        length = decoding.value("length")
        self.depth = length
        self.noises = length
        self.greedy = decoding.greedy
        self.chain = chain(length, target.device)
        q = torch.zeros(batch, length + 1, target.vocab_size, device=target.device)
        self.tree = self.chain.allocate(batch, None if decoding.greedy else q)
        self.last = torch.zeros(batch, target.vocab_size, device=target.device)

    def start_images(self, p):
        self.last.copy_(p)

    def after_step(self, step):
        end = step.path.gather(1, step.accepted[:, None])
        rows = end[:, :, None].expand(-1, -1, step.p.shape[2])
        self.last.copy_(step.p.gather(1, rows).squeeze(1))

    def draft(self, inputs):
        q = self.last[:, None].expand(-1, self.depth, -1).contiguous()
        if self.greedy:
            drawn, able = most_probable(q, 1)
        else:
            drawn, able = draw_without_replacement(q, 1, inputs.noise)
        tokens = torch.cat([inputs.root[:, None], drawn.squeeze(2)], dim=1)
        valid = torch.nn.functional.pad(able.squeeze(2), (1, 0), value=True)
        q_of_nodes = torch.nn.functional.pad(q, (0, 0, 0, 1))
        self.tree.copy_(self.chain.draft(tokens, q_of_nodes, valid))
