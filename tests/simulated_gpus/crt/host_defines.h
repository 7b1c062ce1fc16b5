// NVIDIA's headers want this file for the words below.  It comes with a wheel that torch doesn't install.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __managed__
#define __shared__
#define __location__(a)
#define __specialization_static
