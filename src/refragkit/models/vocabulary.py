"""Embeddings for the control tokens that our format adds to a pretrained model."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from refragkit.data.tokenizer import Tokenizer
from refragkit.errors import ConfigError
from refragkit.models.base import SequenceModel
from refragkit.models.hybrid import HybridLM
from refragkit.models.layers.int8 import Int8Rows
from refragkit.ops.int8 import int8_embedding


@torch.no_grad()
def embed_added_tokens(model: SequenceModel, tokenizer: Tokenizer) -> None:
    """Give the tokenizer's ``added_ids`` rows in the embedding and the head, behind those of the model if need be.

    A new token starts as the mean of the tokens of its name (``<|user|>`` as ``user``), so that each is another from
    the start, also where the embedding is not trained. Rows that a padded vocabulary has in reserve are used first.

    Args:
        model: changed in place.
        tokenizer: loaded from the model's folder.

    Raises:
        ConfigError: the model lacks rows for tokens that were not added here either.
    """
    added = tokenizer.added_ids
    trained = tokenizer.vocab_size - len(added)
    if model.vocab_size < trained:
        raise ConfigError(
            f"the model has a vocabulary of {model.vocab_size}, but the tokenizer has {trained} entries: ids would fall"
            " outside the embedding. Choose the tokenizer that belongs to the model (data.tokenizer=DIR)."
        )
    names = {token_id: tokenizer.encode(token.strip("<|>")) for token, token_id in added.items()}
    rows = max(model.vocab_size, tokenizer.vocab_size)
    embedding, head = model.get_submodule("embed_tokens"), model.get_submodule("lm_head")
    for layer in (embedding,) if model.config.tie_embeddings else (embedding, head):
        if isinstance(layer, Int8Rows):
            starts = {
                token_id: int8_embedding(torch.tensor(name), layer.weight, layer.scale).mean(dim=0)
                for token_id, name in names.items()
            }
            layer.resize_rows(rows, starts)
            continue
        weight: Tensor = layer.get_parameter("weight")
        grown = weight.new_empty(rows, weight.shape[1])
        grown[: len(weight)] = weight
        for token_id, name in names.items():
            grown[token_id] = weight[name].float().mean(dim=0)
        layer.register_parameter("weight", nn.Parameter(grown))
    if isinstance(model, HybridLM) and isinstance(embedding, Int8Rows):
        model.tie_weights()
        head = model.lm_head
    elif model.config.tie_embeddings:
        head.register_parameter("weight", embedding.get_parameter("weight"))
    if isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear):
        embedding.num_embeddings = head.out_features = rows
    model.config = dataclasses.replace(model.config, vocab_size=rows)
