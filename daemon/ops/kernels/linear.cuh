// What the kernels of linear layers are given.
#pragma once
#include "weight_tiles.cuh"

constexpr int MOST_PARTS = 4;

// Rows of one stored matrix; several make one linear layer.
struct Part {
    const u8* tiles;
    const float* row_scale;
    int format;
    int n_tiles;
    int n_rows;
    int first_output;
};

struct Parts {
    Part part[MOST_PARTS];
    int n_parts;
    int n_segments;
};

// x as prepared by prepare.cu: halves [n_segments][w][room][t] of 16 bytes, step hi = 0 then 1; a power of two for each row.
struct Rows {
    const uint4* halves;
    const float* scale;
    int n;
    int room;    // rows that there is memory for; those behind n may hold anything
    int paired;  // rows 2r and 2r + 1 are the halves of row r of x and what rounding left over: their products are added
};

struct Output {
    float* y;
    int stride;  // floats from one row to the next
    int add;     // y += instead of y =
};
