/* Decorations of CUDA's headers. The wheels lack this file, and a C compiler needs none of them. */
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline
#define __no_return__
#define __noinline__ __attribute__((noinline))
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __location__(place)
#define __annotate__(text)
#define __launch_bounds__(...)
#define __specialization_static static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
