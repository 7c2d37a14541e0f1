"""Division of vLLM's prefix cache at the first chunk of a prompt.

vLLM finds a block by a hash of its tokens and of the hash before it; only the first block's hash contains the
request's `cache_salt`. A block that this package fills with a chunk may hold approximate values, so its hash, and all
hashes after it, must also depend on the chunks and on how they are reused. Blocks of the instruction are exact, and
keep vLLM's own hashes: requests with other documents find them, and so do requests without documents.
"""

from __future__ import annotations

import hashlib

from cachecraft_rag.vllm.worker.interfaces import HashedRequest


def divide_blocks(request: HashedRequest, salt: str, *, shared: int, block_size: int) -> None:
    """Make the hashes of a request's blocks depend on a salt, except for the first ones.

    Blocks of the answer follow, because vLLM continues from the last hash. A prompt without a whole block after the
    shared ones shares one block less, or none. To be called once, before vLLM looks into its prefix cache.

    Args:
        request: the request. If it shares no block, as with hashes of another size, `salt` becomes its `cache_salt`.
        salt: salt of the blocks that are not shared.
        shared: number of first tokens whose whole blocks keep their hashes.
        block_size: tokens of a block.
    """
    hashes = request.block_hashes
    has_this_size = len(hashes) == request.num_prompt_tokens // block_size
    kept = min(shared // block_size, len(hashes) - 1) if has_this_size else 0
    if kept <= 0:
        request.cache_salt = salt
        hashes.clear()
        request.update_block_hashes()
        return
    before = hashes[kept - 1]
    del hashes[kept:]
    hashes[-1] = hashlib.sha256(before + salt.encode()).digest()
    request.update_block_hashes()  # continues from the last hash
    hashes[kept - 1] = before
