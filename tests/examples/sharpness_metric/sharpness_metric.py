"""A quality metric: how much neighbouring pixels differ. Pictures that lose detail show."""

from lantern_bench.methods import image_metric


@image_metric("sharpness", meaning="mean step between neighbouring pixels, 0 to 1")
def sharpness(protocol, device):
    """Return the scorer; this one needs no network."""

    def scorer(pictures, prompts):
        steps = [picture.float().diff(dim=-1).abs().mean() / 255 for picture in pictures]
        return [float(step) for step in steps]

    return scorer
