// Building blocks of the operators whose outputs read a low-precision copy of the state, the readout (plugins/contract.py,
// "State formats"). Each of a block's CTA_WARPS warps owns CTA_ROWS rows of one head (whole row tiles) and works alone;
// the warps of a block share a group, so that its rows B or k are staged once. A lane 4 g + t owns, of row g of each
// eight, the columns 16 i + 4 t .. 16 i + 4 t + 3: slots 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a 16-column matrix step.
//
// Stamped in beside what replay.cuh needs: CTA_WARPS, READOUT_FORMAT (READOUT_SAME: the checkpoint itself, which is fp8
// or rounded stochastically), STOCHASTIC.
#pragma once
#include "replay.cuh"
#include "serial.cuh"

constexpr bool NVFP4 = READOUT_FORMAT == READOUT_NVFP4;
// A 16-bit checkpoint that is read itself: it comes here to be rounded stochastically.
constexpr bool WIDE = READOUT_FORMAT == READOUT_SAME && STATE_FORMAT != FORMAT_FP8;
constexpr int M_TILES = round_up(CTA_ROWS, 16) / 16;
constexpr int ROW_GROUPS = CTA_ROWS / 8;
constexpr int TILE_ROWS = ROWS / ROW_TILES;
constexpr int CTA_STATE_ROWS = WARPS * CTA_ROWS;  // rows of a block, neighbours in memory
constexpr int STEPS = COLUMNS / 16;
constexpr int PAIRS = COLUMNS / 32;  // of 16-column blocks
constexpr int TOKEN_ROWS = round_up(MAX_HISTORY, 16);
constexpr int TOKEN_STEPS = TOKEN_ROWS / 16;
// Strides that spread the 8-byte reads of a quad's columns, and the rows of matrix loads, over all banks.
constexpr int KEY_STRIDE = COLUMNS + 16;
constexpr int OWN_STRIDE = M_TILES * 16 + 8;
// Rows of bytes and of 16-bit numbers are padded, nvfp4 rows need no padding.
constexpr int CODE_BYTES = NVFP4 ? COLUMNS / 2 : WIDE ? 2 * COLUMNS : COLUMNS;
constexpr int CODE_STRIDE = NVFP4 ? CODE_BYTES : CODE_BYTES + 16;
constexpr int BLOCK_SCALE_BYTES = NVFP4 ? COLUMNS / 16 : 0;
// The last warp's last matrix step may read 8 rows further than there are.
constexpr int READ_ROWS = CTA_STATE_ROWS + CTA_ROWS % 16;
constexpr int CODES_SIZE = round_up(READ_ROWS * CODE_STRIDE, 128);
constexpr int SCALES_SIZE = round_up(READ_ROWS * BLOCK_SCALE_BYTES, 128);
constexpr int FOLD_KEYS_SIZE = TOKEN_STEPS * PAIRS * 32 * 32;
constexpr int STAGE_SIZE = TILE_ROWS * COLUMNS * 4;
// Power of two by which codes and scales, as the products below take them, are too small.
constexpr int READOUT_EXPONENT = NVFP4 ? 14 + 8 : WIDE ? 0 : 8;
// bf16 rows are multiplied by queries as they are, all others by queries in fp16.
constexpr bool PLAIN_QUERIES = WIDE && STATE_FORMAT == FORMAT_BF16;

static_assert(COLUMNS % 32 == 0 && TILE_ROWS % 8 == 0, "words of 8 codes; eight rows belong to one tile");
#ifdef CTA_WARPS  // prefill kernels have one head a block
static_assert(HEADS_PER_GROUP * CTAS_PER_HEAD % WARPS == 0, "the warps of a block share a group");
#endif
static_assert(!WIDE || STATE_FORMAT == FORMAT_FP16 || ACTIVATION_FORMAT == FORMAT_BF16, "fp32 has the window kernels");

// The exact power of two of an fp32 exponent field 1 to 254; NaN for 255.
DEVICE float power_of_two(int field) {
    return field == 255 ? bits_to_float(0x7fffffffu) : bits_to_float((u32)field << 23);
}

// Rows of a state in memory, from the first that the caller owns: [rows, COLUMNS] and what belongs to them.
struct StateRows {
    state_t* checkpoint;
    unsigned char* checkpoint_scales;
    unsigned char* codes;
    unsigned char* block_scales;  // of nvfp4 [rows, COLUMNS / 16]
    unsigned char* row_scales;    // of nvfp4 and fp8 [rows]

    DEVICE_MEMBER StateRows from(int row) const {
        return {checkpoint + row * COLUMNS, checkpoint_scales + row, codes + row * CODE_BYTES,
                block_scales + row * BLOCK_SCALE_BYTES, row_scales + row};
    }
};

// A row of COLUMNS activations in a warp's registers: a query, or a key.
struct QueryWords {
    static constexpr int WORDS = COLUMNS / 2, COUNT = (WORDS + 31) / 32;
    u32 words[COUNT];

    // Zeros where it is not valid.
    DEVICE_MEMBER void load(const activation_t* from, bool valid) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < COUNT; n++)
            words[n] = valid && n * 32 + lane < WORDS ? ((const u32*)from)[n * 32 + lane] : 0u;
    }
};
