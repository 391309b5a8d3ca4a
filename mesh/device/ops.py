"""The positive list: the aten operators that a client may have run on a peer's device.

Client and server read the same list, by names alone; what is not on it has no way to a peer. It
holds operators that read and write nothing but the tensors, numbers and options they are given.
Left out are operators that make views (a client makes its own), change what a tensor is, leave
memory as they found it (`empty`), touch files or the process (`from_file`), are of another backend,
or are internal and known to trust their arguments.
"""

from __future__ import annotations

__all__ = ["VALUE_SHAPED", "allows"]

_WITH_IN_PLACE = """
    abs acos acosh add addbmm addcdiv addcmul addmm addmv addr asin asinh atan atan2 atanh
    baddbmm bernoulli bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor cauchy ceil celu clamp clamp_max clamp_min conj_physical copysign cos cosh
    cumprod cumsum deg2rad digamma div elu embedding_renorm eq erf erfc erfinv exp exp2 expm1
    exponential fill floor floor_divide fmod frac gcd ge gelu geometric gt hardsigmoid hardswish
    hardtanh heaviside hypot i0 igamma igammac index_add index_copy index_fill index_put
    index_reduce lcm
    ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_normal logical_and logical_not
    logical_or logical_xor logit lt masked_fill masked_scatter mish mul mvlgamma nan_to_num ne
    neg nextafter normal polygamma pow put rad2deg random reciprocal relu remainder renorm round
    rrelu_with_noise rsqrt scatter scatter_add scatter_reduce sgn sigmoid sign silu sin sinc
    sinh sqrt sub tan tanh threshold tril triu trunc uniform xlogy zero
"""
"""Operators that have an in-place form, whose name ends in ``_``, on the list as well."""

_PLAIN = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
    adaptive_max_pool3d_backward affine_grid_generator all allclose amax amin aminmax angle any
    arange argmax argmin as_strided_scatter avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward bartlett_window batch_norm_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits bincount binomial
    blackman_window block_diag bmm bucketize cat channel_shuffle cholesky cholesky_inverse
    cholesky_solve clone col2im complex constant_pad_nd conv_tbc convolution
    convolution_backward count_nonzero cummax cummin diag_embed diagonal_backward
    diagonal_scatter dist dot elu_backward embedding embedding_dense_backward eye fft_fftfreq
    fft_rfftfreq flip fmax fmin fractional_max_pool2d fractional_max_pool2d_backward
    fractional_max_pool3d fractional_max_pool3d_backward frexp full full_like gather
    gelu_backward geqrf glu glu_backward glu_backward_jvp glu_jvp grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hamming_window hann_window
    hardshrink hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    histc histogram huber_loss huber_loss_backward im2col index index_select isin isinf isnan
    isneginf isposinf kaiser_window kthvalue leaky_relu_backward linalg__powsum
    linalg_cholesky_ex linalg_cross linalg_eig linalg_eigvals linalg_householder_product
    linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu
    linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular linalg_vector_norm linear linear_backward linspace
    log_sigmoid_backward log_sigmoid_forward log_softmax logaddexp logaddexp2 logcumsumexp
    logit_backward logspace logsumexp lu_unpack masked_scatter_backward masked_select
    matmul_backward max max_pool2d_backward max_pool2d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    max_unpool2d max_unpool3d maximum mean median min minimum mish_backward mm mode mse_loss
    mse_loss_backward
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward
    multilabel_margin_loss_forward multinomial mv nanmedian nansum native_batch_norm
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward native_norm new_full
    new_ones new_zeros nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward
    nonzero nonzero_static norm normal_functional ones ones_like ormqr pixel_shuffle
    pixel_unshuffle poisson polar prod rand rand_like randint randint_like randn randn_like
    randperm range reflection_pad1d reflection_pad1d_backward reflection_pad2d
    reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward repeat
    repeat_interleave replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward roll rot90
    rrelu_with_noise_backward rrelu_with_noise_functional rsub scalar_tensor searchsorted
    select_backward select_scatter sigmoid_backward signbit silu_backward slice_backward
    slice_scatter slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d
    slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss smooth_l1_loss_backward
    soft_margin_loss soft_margin_loss_backward softmax softplus softplus_backward softshrink
    softshrink_backward sort special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_xlog1py special_zeta stack std std_mean sum take
    tanh_backward threshold_backward topk trace triangular_solve tril_indices triu_indices
    unfold_backward unique_consecutive unique_dim unique_dim_consecutive
    upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d
    upsample_trilinear3d_backward var var_mean vdot where zeros zeros_like copy_ index_copy_
"""
"""Operators without one, or with it alone."""

_INTERNAL = """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _addmm_activation _aminmax _batch_norm_no_update
    _batch_norm_with_update _batch_norm_with_update_functional _cdist_backward _cdist_forward
    _cholesky_solve_helper _compute_linear_combination _conj_physical _convolution _ctc_loss
    _ctc_loss_backward _cummax_helper _cummin_helper _dirichlet_grad _embedding_bag
    _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_forward_only
    _embedding_bag_per_sample_weights_backward _fft_c2c _fft_c2r _fft_r2c _fused_dropout
    _fused_rms_norm_backward _int_mm _is_all_true _is_any_true _linalg_det _linalg_eigh
    _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _log_softmax
    _log_softmax_backward_data _logcumsumexp _masked_scale _masked_softmax
    _masked_softmax_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _pdist_backward _pdist_forward
    _prelu_kernel _prelu_kernel_backward _safe_softmax _sample_dirichlet
    _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _slow_conv2d_backward
    _slow_conv2d_forward _softmax _softmax_backward_data _stack _standard_gamma
    _standard_gamma_grad _to_copy _trilinear _unique _unique2 _unsafe_index _unsafe_index_put
    _unsafe_masked_index _unsafe_masked_index_put_accumulate _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward _upsample_nearest_exact1d
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward _weight_norm_interface _weight_norm_interface_backward
"""
"""Internal operators that public ones come down to."""

_INTERNAL_WITH_IN_PLACE = """
    _add_relu _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad
    _fused_adam _fused_adamw _fused_sgd _index_put_impl
"""
"""The same, with in-place forms."""

_FOREACH_WITH_IN_PLACE = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min copy cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal
    round rsqrt sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""
"""``_foreach_*`` with in-place forms."""

_FOREACH = """
    clone max mm norm powsum copy_
"""
"""``_foreach_*`` without."""

_NAMES = frozenset(
    {
        *_PLAIN.split(),
        *_INTERNAL.split(),
        *(f"_foreach_{name}" for name in _FOREACH.split()),
        *(
            form
            for name in (
                *_WITH_IN_PLACE.split(),
                *_INTERNAL_WITH_IN_PLACE.split(),
                *(f"_foreach_{each}" for each in _FOREACH_WITH_IN_PLACE.split()),
            )
            for form in (name, f"{name}_")
        ),
    }
)

VALUE_SHAPED = frozenset({"arange", "linspace", "logspace", "range", "histc"})
"""Operators in which the value of a scalar decides about the shape of what comes out."""


def allows(name: str) -> bool:
    """Return whether the operator ``aten::NAME.OVERLOAD``, or ``aten::NAME``, is on the list."""
    namespace, _, rest = name.partition("::")
    return namespace == "aten" and rest.partition(".")[0] in _NAMES
