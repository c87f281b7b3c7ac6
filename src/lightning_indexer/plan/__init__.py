# SPDX-License-Identifier: Apache-2.0
"""What context parallelism would bring on given GPUs, model and load, without any of them at hand.

gpus.py      what each GPU can do, with a source per figure        cost.py      times, from bytes and GPU
model.py     the model's geometry                                  exchange.py  what the ranks' exchange costs
memory.py    bytes per token, tokens that fit                      estimate.py  all figures, each with formula and standing
"""
