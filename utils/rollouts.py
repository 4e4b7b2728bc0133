"""What a rollout and its mini-batches are kept in: dataclasses whose fields all have a row for each of B episodes."""

from dataclasses import replace

import torch
from torch.nn.functional import pad

from utils.cli import UserError

WHOLE = ("ids", "attention_mask")  # fields of prompt and response together


class Rows:
    """Episodes as rows of every field: tensors [B, ...], lists of B. Anything else, a number, is of all of them.

    `ids` and `attention_mask`, which is 1 on tokens, are [B, ..., P + L]: P columns of prompts that are padded on the
    left, then L columns of what was sampled after them, padded on the right. `logprobs`, and any tensor with as many
    dimensions, is [B, ..., L].
    """

    def select(self, rows):
        """The episodes of these rows, without the columns that are padding in all of them."""
        L = self.logprobs.shape[-1]
        has_tokens = self.attention_mask[rows].flatten(0, -2).any(0)
        P = has_tokens.numel() - L
        first = P - int(has_tokens[:P].sum())
        width = max(1, int(has_tokens[P:].sum()))
        selected = {}
        for name, x in vars(self).items():
            if isinstance(x, list):
                selected[name] = [x[row] for row in rows.tolist()]
            elif name in WHOLE:
                selected[name] = x[rows][..., first : P + width]
            elif torch.is_tensor(x) and x.dim() > 0:
                selected[name] = x[rows][..., :width] if x.dim() == self.logprobs.dim() else x[rows]
        return replace(self, **selected)

    def by_length(self):
        """The numbers of the rows, the shortest first: rows of like length have little padding."""
        return self.attention_mask.flatten(1).sum(1).argsort(stable=True)

    def split(self, size):
        """The episodes, so many at a time, by length."""
        for rows in self.by_length().split(size):
            yield self.select(rows)

    def map(self, function, size):
        """function(part) of so many episodes at a time, [b, ..., l], as one tensor [B, ..., L].

        It is 0 in the columns that are padding in all episodes of a part.
        """
        outputs = []
        for part in self.split(size):
            missing = self.logprobs.shape[-1] - part.logprobs.shape[-1]
            outputs.append(pad(function(part), (0, missing)))
        return torch.cat(outputs)[self.by_length().argsort()]

    def write_responses(self, response_ids, logprobs):
        """Write B lists of sampled ids, and of their log-probabilities, into rows of prompts alone, [B, 1, *]."""
        P = self.ids.shape[-1] - self.logprobs.shape[-1]
        for row, ids in enumerate(response_ids):
            L = len(ids)
            self.ids[row, 0, P : P + L] = torch.tensor(ids)
            self.attention_mask[row, 0, P : P + L] = 1
            self.response_mask[row, 0, :L] = 1.0
            self.logprobs[row, 0, :L] = torch.tensor(logprobs[row])

    @staticmethod
    def stack(turns, rows, shape):
        """Rollouts of single turns, [B_t, 1, ...], as one of `shape`, which is (B, T); 0 where an episode did not play.

        `rows` has, of each turn, the numbers of the episodes that played it. Lists of texts grow turn by turn.
        """
        L = max(turn.logprobs.shape[-1] for turn in turns)
        P = max(turn.ids.shape[-1] - turn.logprobs.shape[-1] for turn in turns)
        stacked = {}
        for name, first in vars(turns[0]).items():
            if isinstance(first, list):
                stacked[name] = [[] for _ in range(shape[0])]
            elif not torch.is_tensor(first):
                continue
            else:
                width = [P + L] if name in WHOLE else [L][: first.dim() - 2]
                stacked[name] = first.new_zeros(*shape, *width)
            for t, turn in enumerate(turns):
                x = getattr(turn, name)
                if isinstance(first, list):
                    for row, episode in enumerate(rows[t]):
                        stacked[name][episode] += x[row]
                elif first.dim() == 2:
                    stacked[name][rows[t], t] = x[:, 0]
                else:
                    start = P + turn.logprobs.shape[-1] - x.shape[-1] if name in WHOLE else 0
                    stacked[name][rows[t], t, start : start + x.shape[-1]] = x[:, 0]
        return replace(turns[0], **stacked)


def check_transcripts(ids, masks, turn_ids, rewards):
    """Raise UserError for lists that are no transcripts: ids of tokens, 1 on the sampled ones, their turns, rewards.

    A transcript begins with a prompt. Its turns, 0, 1, 2 ..., are in one piece each, and have a reward each.
    """
    sizes = [len(lists) for lists in (ids, masks, turn_ids, rewards)]
    if len(set(sizes)) > 1 or not ids:
        got = "{} lists of ids, {} masks, {} lists of turn ids and {} of rewards".format(*sizes)
        raise UserError(f"a rollout takes one of each for a transcript, got {got}")
    for row, (row_ids, mask, turns, row_rewards) in enumerate(zip(ids, masks, turn_ids, rewards)):
        if not len(row_ids) == len(mask) == len(turns):
            raise UserError(f"transcript {row} has {len(row_ids)} ids, a mask of {len(mask)}, {len(turns)} turn ids")
        if 1 not in mask or mask[0]:
            raise UserError(f"transcript {row} takes a prompt, with 0 in its mask, and then sampled tokens, with 1")
        sampled = [turn if is_sampled else None for turn, is_sampled in zip(turns, mask)]
        pieces = [turn for turn, before in zip(sampled, [None, *sampled]) if turn not in (None, before)]
        if pieces != list(range(len(row_rewards))):
            takes = "turns 0, 1, 2 ... in one piece each, and a reward of each"
            got = f"pieces of the turns {', '.join(map(str, pieces))} and {len(row_rewards)} rewards"
            raise UserError(f"transcript {row} takes {takes}, got {got}")
