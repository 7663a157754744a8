"""API keys to tenants."""

import hashlib
from collections.abc import Container

from shared.errors import Unauthorized
from shared.ids import TenantId

LOCAL = TenantId("")


class Keys:
    """Known API keys; without any, everybody is the one local tenant.

    Keys are looked up by digest, so that timing tells nothing about them.
    """

    def __init__(self, tenants: dict[str, str] | None, operators: Container[str] = ()) -> None:
        self._operators = operators
        self._tenants = (
            None
            if tenants is None
            else {_digest(key): TenantId(tenant) for key, tenant in tenants.items()}
        )

    def tenant_of_key(self, key: str | None) -> TenantId:
        """Return the key's tenant. Raises ``Unauthorized`` without a known key."""
        if self._tenants is None:
            return LOCAL
        if not key:
            raise Unauthorized("no API key given: send `Authorization: Bearer KEY`")
        tenant = self._tenants.get(_digest(key))
        if tenant is None:
            raise Unauthorized("unknown API key")
        return tenant

    def operates(self, tenant: TenantId) -> bool:
        """Whether a tenant may ask how the fleet is and give it orders."""
        return self._tenants is None or tenant in self._operators

    def tenant_of_header(self, authorization: str | None) -> TenantId:
        """Return the tenant for an ``Authorization`` header. Raises ``Unauthorized``."""
        scheme, _, key = (authorization or "").partition(" ")
        return self.tenant_of_key(key.strip() if scheme.lower() == "bearer" else None)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=16).digest()
