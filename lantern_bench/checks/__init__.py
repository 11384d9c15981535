"""Checks of correctness. None of them reports speed.

- `doctor.py`: does the installation work on this machine?
- `check_model.py`: does a model keep the protocol of decoding?
- `check_run.py`: is a run complete and undamaged?
- `certification.py`: are lossless modes lossless here, and do the claims of other modes hold?
  Its parts are `claims.py` (what is claimed), `trials.py` (what is decoded), `tabular_model.py` and
  `image_tests.py` (the tests).
"""
