// Numbers for soft GPUs: each CUDA kernel of torch's operators is replaced by one boxed fallback. It
// hands the memory of CUDA tensors, which is host memory (runtime.c), to the operator's CPU kernel,
// and puts new results into CUDA tensors. Operators that only CUDA has are written out below.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/copy_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

extern "C" cudaError_t soft_gpu_operator(const char* name);  // runtime.c: counts it, or fails

namespace {
using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Names = std::set<std::string>;

// Memory and metadata: CUDA's own code launches no kernel.
const Names kNative{
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor", "aten::is_set_to", "aten::record_stream",
    "aten::_local_scalar_dense",
};
// Composites that choose a CUDA library, or launch a kernel, before another operator is called.
const Names kComposite{"aten::convolution", "aten::copy_"};
// These wait for the device: for the size of their result, or for a check.
const Names kWaits{
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out",
    "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::linalg_eig", "aten::linalg_eig.out",
};
const Names kIndex{"aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_"};
// These also take tensors of the CPU, of any size.
const Names kMixed{
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_index_put_impl_", "aten::copy_",
    "aten::_foreach_copy_", "aten::_ctc_loss", "aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward",
    "aten::_ctc_loss_backward.Tensor",
};

bool is_cuda(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }
bool is_mask(const Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

void wait_for_device() {
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream());
}

uint64_t mixed(uint64_t bits) {  // as SplitMix64 does
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

void for_each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& each : value.toTensorVector()) visit(each);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      if (each) visit(*each);
}

// A call of an operator.
class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack)
      : op_(op), name_(toString(op.operator_name())), stack_(*stack),
        num_arguments_(op.schema().arguments().size()),
        given_(stack->end() - num_arguments_, stack->end()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(device_);
    C10_CUDA_CHECK(soft_gpu_operator(name_.c_str()));
    if (name_ == "aten::copy_" && given_[0].toTensor().is_cuda() != given_[1].toTensor().is_cuda()) {
      Tensor to = given_[0].toTensor();
      at::native::copy_(to, given_[1].toTensor(), given_[2].toBool());
      return end_with(to);
    }
    if (waits()) wait_for_device();
    const size_t first = stack_.size() - num_arguments_;
    for (size_t i = 0; i < num_arguments_; ++i)
      stack_[first + i] = on_cpu(given_[i], op_.schema().arguments()[i]);
    {
      at::AutoDispatchBelowAutograd below;
      c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    }
    for (auto& [out, stand_in] : outs_)
      if (out.sizes() != stand_in.sizes() || stand_in.numel()) {
        out.resize_(stand_in.sizes());
        out.copy_(stand_in, true);
      }
    const auto& returns = op_.schema().returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& value = stack_[stack_.size() - returns.size() + i];
      value = is_argument(returns[i]) ? argument_of(returns[i]) : on_cuda(value);
    }
  }

 private:
  // All CUDA tensors, and tensors of the CPU with dimensions, must be on one device.
  void find_device() {
    for (const IValue& value : given_) {
      for_each_tensor(value, [&](const Tensor& t) { if (is_cuda(t)) use_device(t.device()); });
      if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index())
        use_device(value.toDevice());
    }
    for (const IValue& value : given_)
      for_each_tensor(value, [&](const Tensor& tensor) {
        if (tensor.defined() && !tensor.is_cuda() && tensor.dim()) use_device(tensor.device());
      });
    if (!has_device_) device_ = at::Device(at::kCUDA, c10::cuda::current_device());
  }

  void use_device(at::Device device) {
    if (!has_device_ && device.is_cuda()) device_ = device, has_device_ = true;
    TORCH_CHECK(!has_device_ || device == device_ || kMixed.count(name_),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device_, " and ", device, "! (soft GPU, ", name_, ")");
  }

  bool waits() const {
    if (kIndex.count(name_) == 0) return kWaits.count(name_);
    bool has_mask = false, has_host = false;
    int num_indices = 0;
    for_each_tensor(given_[1], [&](const Tensor& index) {
      if (!index.defined()) return;
      ++num_indices;
      has_host |= !index.is_cuda();
      has_mask |= is_mask(index);
    });
    const bool is_fill = name_ == "aten::_index_put_impl_" && num_indices == 1 && !has_host &&
                         given_[2].toTensor().is_cpu() && given_[2].toTensor().numel() == 1;
    return has_host || (has_mask && !is_fill);  // masked_fill needs no positions
  }

  IValue on_cpu(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return on_cpu(value.toTensor(), argument.is_out());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(on_cpu(each, false));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorList())
        list.push_back(each ? std::optional<Tensor>(on_cpu(*each, false)) : each);
      return list;
    }
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (argument.name() == "pin_memory") return IValue(false);
    if (argument.name() == "generator") return seeded(value);
    return value;
  }

  Tensor on_cpu(const Tensor& tensor, bool is_out) {
    if (!is_cuda(tensor)) return tensor;
    TORCH_CHECK(tensor.layout() == at::kStrided, "soft GPU: no numbers for ", name_, " of a tensor "
                "with layout ", tensor.layout());
    const auto options = tensor.options().device(at::kCPU);
    if (tensor.numel() == 0) {  // the memory of another tensor can't grow
      Tensor stand_in = at::empty_strided(tensor.sizes(), tensor.strides(), options);
      if (is_out) outs_.emplace_back(tensor, stand_in);
      return stand_in;
    }
    Tensor same = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
    same._set_conj(tensor.is_conj());
    same._set_neg(tensor.is_neg());
    return same;
  }

  // A generator of the CPU, from the seed and the offset of the device's.
  IValue seeded(const IValue& given) {
    at::Generator own = given.isNone() ? at::globalContext().defaultGenerator(device_)
                                       : given.toGenerator();
    if (own.device().is_cpu()) return own;
    std::lock_guard<std::mutex> lock(own.mutex());
    const uint64_t offset = own.unsafeGetGeneratorImpl()->get_offset();
    own.unsafeGetGeneratorImpl()->set_offset(offset + 4);
    return at::detail::createCPUGenerator(mixed(mixed(own.current_seed()) + offset) & 0xffffffff);
  }

  IValue on_cuda(const IValue& value) {
    if (value.isTensor()) return on_cuda(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(on_cuda(each));
    return list;
  }

  Tensor on_cuda(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(),
                                    tensor.options().device(device_).pinned_memory(false));
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    if (tensor.numel())
      memcpy(made.data_ptr(), tensor.const_data_ptr(), (last + 1) * tensor.element_size());
    return made;
  }

  static bool is_argument(const c10::Argument& result) {
    return result.alias_info() && result.alias_info()->isWrite();
  }
  IValue argument_of(const c10::Argument& result) const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < num_arguments_; ++i)
      if (arguments[i].alias_info() &&
          arguments[i].alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return given_[i];
    TORCH_CHECK(false, "soft GPU: ", name_, " returns an unknown argument");
  }

  void end_with(const Tensor& result) {
    stack_.resize(stack_.size() - num_arguments_);
    stack_.emplace_back(result);
  }

  const OperatorHandle& op_;
  const std::string name_;
  Stack& stack_;
  const size_t num_arguments_;
  const std::vector<IValue> given_;
  at::Device device_{at::kCUDA, 0};
  bool has_device_ = false;
  std::vector<std::pair<Tensor, Tensor>> outs_;  // empty ones, with what the CPU's kernel fills
};

void compute_on_cpu(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, stack).run();
}

void refuse(const OperatorHandle& op, c10::DispatchKeySet, Stack*) {
  TORCH_CHECK(false, "soft GPU: no numbers for ", op.operator_name(), ", which the CPU lacks");
}

// ---- operators that only CUDA has: from arguments to results ----

using Values = std::vector<IValue>;

Tensor maybe(const IValue& value) { return value.isNone() ? Tensor() : value.toTensor(); }
Tensor per_channel(const Tensor& values, const Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = -1;
  return values.reshape(shape);
}
std::vector<int64_t> all_but_channels(const Tensor& tensor) {
  std::vector<int64_t> dims;
  for (int64_t i = 0; i < tensor.dim(); ++i) if (i != 1) dims.push_back(i);
  return dims;
}
Tensor sum_if(bool is_wanted, const Tensor& tensor) { return is_wanted ? tensor.sum(0) : Tensor(); }

Values use_no_library(const Values&) { return {false}; }

Values native_dropout(const Values& a) {  // input, p, train
  const Tensor x = a[0].toTensor();
  const double keep = 1 - a[1].toDouble();
  if (!a[2].isNone() && !a[2].toBool()) return {x.clone(), at::ones_like(x, at::kBool)};
  const Tensor mask = at::empty_like(x, at::kBool).bernoulli_(keep);
  return {x * mask * (keep == 0 ? 0. : 1 / keep), mask};
}

Values lstm_cell(const Values& a) {  // input gates, hidden gates, cell, input bias, hidden bias
  Tensor gates = a[0].toTensor() + a[1].toTensor();
  if (maybe(a[3]).defined()) gates = gates + a[3].toTensor() + a[4].toTensor();
  const auto parts = gates.chunk(4, 1);
  const Tensor i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(),
               o = parts[3].sigmoid(), cell = f * a[2].toTensor() + i * g;
  return {o * cell.tanh(), cell, at::cat({i, f, g, o}, 1)};
}

Values lstm_cell_backward(const Values& a) {  // grad hidden, grad cell, cell, new cell, gates, bias?
  const Tensor new_cell = a[3].toTensor(), tanh = new_cell.tanh();
  const Tensor grad_hidden = maybe(a[0]).defined() ? a[0].toTensor() : at::zeros_like(new_cell);
  const auto parts = a[4].toTensor().chunk(4, 1);
  const Tensor i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  Tensor grad = grad_hidden * o * (1 - tanh * tanh);
  if (maybe(a[1]).defined()) grad = grad + a[1].toTensor();
  const Tensor gates = at::cat({grad * g * i * (1 - i), grad * a[2].toTensor() * f * (1 - f),
                                grad * i * (1 - g * g), grad_hidden * tanh * o * (1 - o)}, 1);
  return {gates, grad * f, sum_if(a[5].toBool(), gates)};
}

Values gru_cell(const Values& a) {  // input gates, hidden gates, hidden, input bias, hidden bias
  const bool has_bias = maybe(a[3]).defined();
  const auto x = (has_bias ? a[0].toTensor() + a[3].toTensor() : a[0].toTensor()).chunk(3, 1);
  const auto h = (has_bias ? a[1].toTensor() + a[4].toTensor() : a[1].toTensor()).chunk(3, 1);
  const Tensor hidden = a[2].toTensor(), reset = (x[0] + h[0]).sigmoid(),
               update = (x[1] + h[1]).sigmoid(), fresh = (x[2] + reset * h[2]).tanh();
  return {fresh + update * (hidden - fresh), at::cat({reset, update, fresh, hidden, h[2]}, 1)};
}

Values gru_cell_backward(const Values& a) {  // grad, workspace, has bias
  const Tensor grad = a[0].toTensor();
  const auto parts = a[1].toTensor().chunk(5, 1);
  const Tensor reset = parts[0], update = parts[1], fresh = parts[2], hidden = parts[3];
  const Tensor of_update = grad * (hidden - fresh) * update * (1 - update);
  const Tensor of_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const Tensor of_reset = of_fresh * parts[4] * reset * (1 - reset);
  const Tensor x = at::cat({of_reset, of_update, of_fresh}, 1);
  const Tensor h = at::cat({of_reset, of_update, of_fresh * reset}, 1);
  return {x, h, grad * update, sum_if(a[2].toBool(), x), sum_if(a[2].toBool(), h)};
}

Values rms_norm_backward(const Values& a) {  // grad, input, shape, rstd, weight, wanted
  const Tensor grad = a[0].toTensor().to(at::kFloat), input = a[1].toTensor();
  const Tensor rstd = a[3].toTensor(), weight = maybe(a[4]);
  const int64_t rest = input.dim() - int64_t(a[2].toIntVector().size());
  std::vector<int64_t> dims, others;
  for (int64_t i = 0; i < input.dim(); ++i) (i < rest ? others : dims).push_back(i);
  const Tensor normed = input.to(at::kFloat) * rstd;
  const Tensor scaled = weight.defined() ? grad * weight : grad;
  Tensor of_input = (scaled - normed * (scaled * normed).mean(dims, true)) * rstd, of_weight;
  if (weight.defined() && a[5].toBoolList()[1])
    of_weight = (others.empty() ? grad * normed : (grad * normed).sum(others)).to(weight.dtype());
  return {of_input.to(input.dtype()), of_weight};
}

Values norm_stats(const Values& a) {  // input, eps
  const auto [variance, mean] =
      at::var_mean(a[0].toTensor().to(at::kFloat), all_but_channels(a[0].toTensor()), 0);
  return {mean, (variance + a[1].toDouble()).rsqrt()};
}

Values norm_gather_stats(const Values& a) {
  // input, means, inverse deviations, running mean, running variance, momentum, eps, counts
  const Tensor counts = a[7].toTensor().reshape({-1, 1}).to(a[1].toTensor().dtype());
  const Tensor means = a[1].toTensor(), n = counts.sum(), mean = (means * counts).sum(0) / n;
  const double momentum = a[5].toDouble(), eps = a[6].toDouble();
  const Tensor spread =
      ((a[2].toTensor().pow(-2) - eps + (means - mean).pow(2)) * counts).sum(0);
  Tensor running_mean = maybe(a[3]), running_variance = maybe(a[4]);
  if (running_mean.defined()) running_mean.lerp_(mean.to(running_mean.dtype()), momentum);
  if (running_variance.defined())
    running_variance.lerp_((spread / (n - 1)).to(running_variance.dtype()), momentum);
  return {mean, (spread / n + eps).rsqrt()};
}

Values norm_apply(const Values& a) {  // input, weight, bias, mean, inverse deviation, eps
  const Tensor x = a[0].toTensor();
  Tensor y = (x.to(at::kFloat) - per_channel(a[3].toTensor(), x)) * per_channel(a[4].toTensor(), x);
  if (maybe(a[1]).defined()) y = y * per_channel(a[1].toTensor(), x);
  if (maybe(a[2]).defined()) y = y + per_channel(a[2].toTensor(), x);
  return {y.to(x.dtype())};
}

Values norm_backward_reduce(const Values& a) {
  // grad, input, mean, inverse deviation, weight, and which of input, weight, bias is wanted
  const Tensor grad = a[0].toTensor().to(at::kFloat), x = a[1].toTensor().to(at::kFloat);
  const auto dims = all_but_channels(x);
  const Tensor sum = grad.sum(dims);
  const Tensor product = (grad * (x - per_channel(a[2].toTensor(), x))).sum(dims);
  return {sum, product, a[6].toBool() ? product * a[3].toTensor() : Tensor(),
          a[7].toBool() ? sum.clone() : Tensor()};
}

Values norm_backward_apply(const Values& a) {
  // grad, input, mean, inverse deviation, weight, sum of grad, sum of their product, counts
  const Tensor x = a[1].toTensor(), n = a[7].toTensor().sum(), invstd = a[3].toTensor();
  const Tensor centred = x.to(at::kFloat) - per_channel(a[2].toTensor(), x);
  const Tensor scale = per_channel(invstd.pow(2) * a[6].toTensor() / n, x);
  Tensor grad = a[0].toTensor().to(at::kFloat) - per_channel(a[5].toTensor() / n, x);
  grad = (grad - centred * scale) * per_channel(invstd, x);
  if (maybe(a[4]).defined()) grad = grad * per_channel(a[4].toTensor(), x);
  return {grad.to(x.dtype())};
}

// Copies between the host and devices wait one by one, as the operator copy_ does.
Values foreach_copy(const Values& a) {
  at::native::foreach_tensor_copy_list_kernel_slow_(a[0].toTensorVector(), a[1].toTensorVector(),
                                                    a[2].toBool());
  return {};
}

const std::map<std::string, Values (*)(const Values&)> kWritten{
    {"aten::_use_cudnn_ctc_loss", use_no_library},
    {"aten::_use_cudnn_ctc_loss.Tensor", use_no_library},
    {"aten::_use_miopen_ctc_loss", use_no_library},
    {"aten::_use_miopen_ctc_loss.Tensor", use_no_library},
    {"aten::_foreach_copy_", foreach_copy},
    {"aten::native_dropout", native_dropout},
    {"aten::_thnn_fused_lstm_cell", lstm_cell},
    {"aten::_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
    {"aten::_thnn_fused_gru_cell", gru_cell},
    {"aten::_thnn_fused_gru_cell_backward", gru_cell_backward},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
    {"aten::batch_norm_stats", norm_stats},
    {"aten::batch_norm_gather_stats_with_counts", norm_gather_stats},
    {"aten::batch_norm_elemt", norm_apply},
    {"aten::batch_norm_backward_reduce", norm_backward_reduce},
    {"aten::batch_norm_backward_elemt", norm_backward_apply},
};

void compute_as_written(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Values arguments(stack->end() - count, stack->end());
  const Values results = kWritten.at(toString(op.operator_name()))(arguments);
  stack->resize(stack->size() - count);
  stack->insert(stack->end(), results.begin(), results.end());
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

c10::KernelFunction kernel_for(const OperatorHandle& op, const std::string& name) {
  if (kWritten.count(name)) return c10::KernelFunction::makeFromBoxedFunction<&compute_as_written>();
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
    return c10::KernelFunction::makeFromBoxedFunction<&refuse>();
  return c10::KernelFunction::makeFromBoxedFunction<&compute_on_cpu>();
}
}  // namespace

extern "C" __attribute__((visibility("default"))) void soft_gpu_install() {
  static auto* kept = new std::vector<c10::RegistrationHandleRAII>;  // for ever
  Quiet quiet;  // torch warns of each replacement
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  for (const std::string& name : kComposite) names.emplace_back(name, "");
  for (const auto& operator_name : names) {
    const std::string name = toString(operator_name);
    const auto op = dispatcher.findSchema(operator_name);
    if (!op || name.rfind("aten::", 0) != 0 || kNative.count(name)) continue;
    bool is_view = false;  // of which CUDA's own code is right
    for (const auto& result : op->schema().returns())
      is_view |= result.alias_info() && !result.alias_info()->isWrite();
    if (is_view) continue;
    kept->push_back(dispatcher.registerImpl(operator_name, c10::DispatchKey::CUDA,
                                            kernel_for(*op, name), std::nullopt, nullptr, "soft"));
  }
  auto& context = at::globalContext();  // libraries and kernels of CUDA that nothing here replaces
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
}
