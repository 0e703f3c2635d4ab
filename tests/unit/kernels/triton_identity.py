"""What Triton names its cache's entries by: a hash over all of its own files, which takes half a second.

Imported before processes are forked, so that none of them computes it again.
"""

from triton.runtime.cache import triton_key

IDENTITY = triton_key()
