"""Keys, and the lines of a file of them."""

import json

from contract.domain.api_keys import hash_api_key

KEY, OTHER_KEY, WRONG_KEY = "psk_of-one", "psk_of-other", "psk_of-nobody"


def line(key: str, tenant: str, **fields: object) -> str:
    return json.dumps({"tenant": tenant, "sha256": hash_api_key(key).hex(), **fields}) + "\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
