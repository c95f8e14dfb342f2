"""The part of the section [server] about pictures."""

from typing import Annotated, Any, ClassVar

from engine.settings.section import Addition, key
from engine.types.errors import ConfigError
from server.extensions.images.hosts import AllowedHost


class MediaSettings(Addition, frozen=True):
    """The part of [server] about pictures."""

    table: ClassVar[str] = "server"

    media_hosts: Annotated[tuple[str, ...], key(
        "Hosts that pictures may be fetched from by http(s), e.g. ['images.example.org', 'minio:9000']; "
        "'*.example.org' and '*' allow hosts with public addresses", is_place=True
    )] = ()

    def check(self, config: Any) -> None:
        for given in self.media_hosts:
            if AllowedHost.read(given) is None:
                raise ConfigError(
                    f"server.media_hosts: '{given}' is no host; expected a name or an address with an optional port, "
                    "such as 'images.example.org', '*.example.org', 'minio:9000' or '[fd00::1]:9000', without a scheme"
                )
