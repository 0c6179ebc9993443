"""A complete drafter: after each token, what followed it last. docs/drafters.md explains it."""

from itertools import pairwise

from hf_specstate import Drafter, TokenTree


class BigramDrafter(Drafter):
    name = "bigram"

    def start(self, context):
        self.sequences = context.sequences
        self.follows = [dict(pairwise(tokens)) for tokens in context.sequences.tokens]

    def propose(self, request):
        token, path = request.token_ids[-1], []
        while token in self.follows[request.row] and len(path) < min(request.max_nodes, request.max_depth):
            path.append(token := self.follows[request.row][token])
        return TokenTree.from_paths([path], self.name)

    def observe(self, outcomes):
        for outcome in outcomes:
            tail = self.sequences.tokens[outcome.row][-1 - len(outcome.token_ids) :]
            self.follows[outcome.row].update(pairwise(tail))
