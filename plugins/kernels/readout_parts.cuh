// The state parts of the readout kernels in contract.state_parts' order, which depend on the formats.
#pragma once
#include "formats.cuh"

#if STOCHASTIC
#define ROUNDING_SCALARS int rounding_seed,
#define ROUNDING_KEY(head, position) RoundingKey{(u32)rounding_seed, (u32)(head), (u32)(position), (u32)layer}
#else
#define ROUNDING_SCALARS
#define ROUNDING_KEY(head, position) RoundingKey{}
#endif

#if STATE_FORMAT == FORMAT_FP8
#define CHECKPOINT_SCALE_IN const unsigned char* checkpoint_scale_in,
#define CHECKPOINT_SCALE_STRIDE int checkpoint_scale_stride,
#define CHECKPOINT_SCALE_OUT unsigned char* checkpoint_scale,
#define CHECKPOINT_SCALES(slot) checkpoint_scale + offset_of(slot, checkpoint_scale_stride)
#else
#define CHECKPOINT_SCALE_IN
#define CHECKPOINT_SCALE_STRIDE
#define CHECKPOINT_SCALE_OUT
#define CHECKPOINT_SCALES(slot) nullptr
#endif

#if READOUT_FORMAT == READOUT_NVFP4
#define READOUT_IN                                                                                    \
    const unsigned char *readout_in, const unsigned char *readout_block_scale_in, const unsigned char *readout_scale_in,
#define READOUT_STRIDES int readout_stride, int readout_block_scale_stride, int readout_scale_stride,
#define READOUT_OUT unsigned char *readout, unsigned char *readout_block_scale, unsigned char *readout_scale,
#define READOUT_ROWS(slot)                                                              \
    readout + offset_of(slot, readout_stride),                                       \
        readout_block_scale + offset_of(slot, readout_block_scale_stride),           \
        readout_scale + offset_of(slot, readout_scale_stride)
#elif READOUT_FORMAT == READOUT_FP8
#define READOUT_IN const unsigned char *readout_in, const unsigned char *readout_scale_in,
#define READOUT_STRIDES int readout_stride, int readout_scale_stride,
#define READOUT_OUT unsigned char *readout, unsigned char *readout_scale,
#define READOUT_ROWS(slot)                        \
    readout + offset_of(slot, readout_stride), nullptr, \
        readout_scale + offset_of(slot, readout_scale_stride)
#else
#define READOUT_IN
#define READOUT_STRIDES
#define READOUT_OUT
#define READOUT_ROWS(slot) \
    (unsigned char*)(checkpoint + offset_of(slot, checkpoint_stride)), nullptr, CHECKPOINT_SCALES(slot)
#endif

#define STATE_PARTS_IN const state_t *checkpoint_in, const int *position_in, CHECKPOINT_SCALE_IN READOUT_IN
#define STATE_PARTS_STRIDES int checkpoint_stride, int position_stride, CHECKPOINT_SCALE_STRIDE READOUT_STRIDES
#define STATE_PARTS_OUT state_t *checkpoint, int *position, CHECKPOINT_SCALE_OUT READOUT_OUT

// The rows of a slot.
#define STATE_ROWS(slot)                                                                                    \
    StateRows {                                                                                             \
        checkpoint + offset_of(slot, checkpoint_stride), CHECKPOINT_SCALES(slot), READOUT_ROWS(slot) \
    }
