"""What a page of /metrics says."""

from prometheus_client.parser import text_string_to_metric_families

ALL_HAVE = ("model_name", "engine")


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    """Values by (name, label=value…), without the labels that all have."""
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key not in ALL_HAVE)): (
            sample.value
        )
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
