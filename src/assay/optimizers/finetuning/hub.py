"""Whether the Hugging Face hub can be reached. Its client retries every file of a model for half a minute."""

import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

from assay.support.scrubbing import error_text

CONNECT_S = 30.0  # enough for five transmissions of the first packet: a slow network is not an absent one
PAUSE_S = 1.0  # before the second of two tries: a name server may answer late


def why_unreachable(source: str) -> str:
    """Reason why the hub, which has the model `source`, cannot be reached; empty if it can, or is not needed.

    It is not asked about folders, where it was turned off (`HF_HUB_OFFLINE`), or where a proxy is set, of which its
    client supports more kinds than this check. An error of any other kind than that of a connection, such as an
    unknown certificate or a status, is left to the client.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(source).exists() or urllib.request.getproxies():
        return ""
    address = constants.ENDPOINT
    if not (reason := _failure(address)):
        return ""
    time.sleep(PAUSE_S)
    reason = _failure(address)
    return f"{address} cannot be reached ({reason})" if reason else ""


def _failure(address: str) -> str:
    """Why no connection can be made; empty if one can."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=CONNECT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:  # before an answer; the time limit of an answer is a TimeoutError
        if isinstance(error.reason, socket.gaierror | ConnectionError | TimeoutError) or type(error.reason) is OSError:
            return error_text(error.reason)
    except (OSError, ValueError):
        pass
    return ""
