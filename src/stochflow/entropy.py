"""The entropy band and ratio (`stochflow.learn.entropy`), under the name that the source documents use."""

from stochflow.learn.entropy import *  # noqa: F403
