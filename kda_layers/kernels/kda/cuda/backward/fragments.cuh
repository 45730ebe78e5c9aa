// A warp's 16 channels of a block of 16 tokens.
//
// Lane (g, t) = (id / 4, id % 4) has channels g and g + 8 of tokens 2 t and 2 t + 1 of each 8 tokens: the order of
// mma's accumulators, with channels as rows, and of its A operand. A product of channels and tokens by tokens and
// tokens reads and writes this order, so that nothing is transposed.
#pragma once
#include "gradients.cuh"

using Fragment = float[4];  // 16 channels x 8 tokens: [2 * (channel g, g + 8) + (token 2 t, 2 t + 1)]

DEVICE int channel_of(Lane lane, int c) { return 16 * lane.warp + lane.id / 4 + 8 * c; }

// Offset of a warp's part of 16 rows of a matrix of `rows` rows, for ldmatrix and stmatrix.
DEVICE int rows_at(Lane lane, int b, int rows) {
    // 16 rows on, the swizzle is the same, which the compiler does not see
    return piece_at(lane.id / 16 * 8 + lane.id % 8, 2 * lane.warp + lane.id / 8 % 2, rows) + 16 * b * PANEL_ROW;
}

DEVICE void load_block(Lane lane, Fragment (&x)[2], const unsigned char* matrix, int b, int rows = CHUNK) {
    u32 r[4];
    ldmatrix_x4_trans(r, matrix + rows_at(lane, b, rows));
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = Io::unpack(r[i]);
        x[i / 2][i % 2 * 2] = pair.x, x[i / 2][i % 2 * 2 + 1] = pair.y;
    }
}

DEVICE void store_block(Lane lane, unsigned char* matrix, const Fragment (&x)[2], int b) {
    stmatrix_x4_trans(matrix + rows_at(lane, b, CHUNK), Io::pack(x[0][0], x[0][1]), Io::pack(x[0][2], x[0][3]),
                      Io::pack(x[1][0], x[1][1]), Io::pack(x[1][2], x[1][3]));
}

DEVICE int token_of(Lane lane, int b, int o, int i) { return 16 * b + 8 * o + 2 * (lane.id % 4) + i % 2; }

DEVICE float rate_of_gates(const Shared& shared) { return exp2_fast(*shared.A_log() * LOG2_E); }
