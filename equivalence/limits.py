"""All thresholds of this folder, each with its reason.  Nearly all are relative."""

import torch

# Link 1: the mean of the ranks' own gradients and what the optimizer got, of each tensor.
AVERAGED = 2e-6  # float32: a sum of so few numbers, divided before or after
AVERAGED_COARSE = 1e-2  # gradients in bfloat16 or float16: their last digit is up to 8e-3
DEVIATIONS = 4  # of the mean of a message's rounding errors, which are as often up as down
COEFFICIENT = 2e-3  # of a sum of the ranks' gradients: one that is nearer to 0 or 1 is 0 or 1

# Link 2: the mean of the ranks' own gradients and that of one batch, of each tensor.
ROUNDING = 4 * torch.finfo(torch.float32).eps  # times the root of the number of examples
YARDSTICKS = 10  # a measured rounding may be small by chance: this many times it is rounding
MOST = 1e-3  # no larger difference is rounding, whatever was measured
MOST_COARSE = 1e-2  # layers that compute in bfloat16 or float16
SMALL = 1e-3  # a smaller tensor is compared with this part of the whole gradient
SMALL_COARSE = 1.0  # in bfloat16 or float16, where a small tensor is mostly rounding
CLEARLY = 10  # a better explanation leaves this many times less; a share's limit is stricter
OWN = 1e-4  # a rank's examples, computed again alone, and its own gradient

# Link 3: the change of each weight.
UPDATED = 1e-5  # equal numbers go in, but an optimizer may add them up in another order
DIGITS = 2  # a weight may differ by this many units in its last digit
SCHEDULE = 1e-2  # a rate's, over a few steps, if an epoch has another number of steps

SEEN = 5e-2  # THE SAME is said if each link notices differences larger than this
COARSE = 1e-4  # a number format with a larger last digit is coarse
ALIKE = 0.05  # this part of the examples that a program draws may be alike by chance
OFTEN = 0.2  # more than this part, in each step, is no chance
GROUPS = 3  # numbers that count up to less may be labels, and not the numbers of groups
AHEAD = 4  # steps whose batches a loader may have read in advance
FOLLOWED = 200_000  # examples that --epoch remembers; of more it takes a sample
LARGEST_EPOCH = 10_000_000  # indices that are listed
