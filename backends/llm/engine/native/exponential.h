// e^x for the kernels' loops, written for the compiler to vectorise.

#pragma once

#include <cstdint>
#include <cstring>

// Accurate to 2e-7 for x of -87 and more, and never below e^-87. 2^n * e^r with |r| <= ln(2) / 2, and the Taylor series
// of e^r. NaN stays NaN.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = x * 1.44269504f;
    n = static_cast<float>(static_cast<int32_t>(n + (n < 0.0f ? -0.5f : 0.5f)));
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}
